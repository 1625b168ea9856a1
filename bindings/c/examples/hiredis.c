/* hiredis with libfourtuple: the program connects, and redisConnectFd() takes the descriptor.
 *
 *     cc hiredis.c -lhiredis -lfourtuple -o hiredis && ./hiredis 127.0.0.1 6379 10
 *
 * opens 10 connections at the same time, sends PING on each, and prints their source ports. */
#include <arpa/inet.h>
#include <errno.h>
#include <fourtuple.h>
#include <hiredis/hiredis.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Returns a connected descriptor, or -1 with the cause in *error. */
static int dial(const fourtuple_dialer *dialer, const struct sockaddr_in *destination, struct fourtuple_report *report, struct fourtuple_error *error) {
    fourtuple_attempt *attempt;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    int next = fourtuple_prepare(dialer, fd, &attempt, error);
    while (next >= 0 && connect(fd, (const struct sockaddr *)destination, sizeof *destination) < 0) {
        next = fourtuple_next(attempt, fd, errno, error);
        if (next == FOURTUPLE_FRESH_SOCKET) {
            close(fd);
            fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
            next = fourtuple_renew(attempt, fd, error);
        }
    }
    if (next >= 0 && fourtuple_finish(attempt, fd, report, error) == 0)
        return fd;
    if (next < 0)
        fourtuple_abandon(attempt);
    close(fd);
    return -1;
}

int main(int argc, char **argv) {
    struct sockaddr_in destination = {.sin_family = AF_INET};
    if (argc != 4 || inet_pton(AF_INET, argv[1], &destination.sin_addr) != 1)
        return 2;
    destination.sin_port = htons((uint16_t)atoi(argv[2]));
    struct fourtuple_error error;
    fourtuple_dialer *dialer;
    if (fourtuple_dialer_new((struct sockaddr *)&destination, sizeof destination, NULL, &dialer, &error) < 0) {
        fprintf(stderr, "%s\n", error.message);
        return 1;
    }
    int wanted = atoi(argv[3]), opened = 0;
    redisContext **contexts = calloc((size_t)wanted, sizeof *contexts);
    for (; opened < wanted; opened++) {
        struct fourtuple_report report;
        int fd = dial(dialer, &destination, &report, &error);
        if (fd < 0) {
            fprintf(stderr, "%s\n", error.message);
            break;
        }
        contexts[opened] = redisConnectFd(fd); /* redisFree() closes it */
        redisReply *reply = redisCommand(contexts[opened], "PING");
        if (reply == NULL || strcmp(reply->str, "PONG") != 0)
            fprintf(stderr, "%s\n", contexts[opened]->errstr);
        freeReplyObject(reply);
        printf("%d\n", ntohs(((struct sockaddr_in *)&report.source)->sin_port));
    }
    for (int i = 0; i < opened; i++)
        redisFree(contexts[i]);
    free(contexts);
    fourtuple_dialer_free(dialer);
    return opened < wanted;
}
