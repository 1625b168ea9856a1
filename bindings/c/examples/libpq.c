/* libpq with libfourtuple. libpq opens and connects its socket itself, and has no function of the user for either. A connect() of the
 * program comes before the one of libc for all shared libraries of the process, so this one prepares the socket first.
 *
 *     cc libpq.c -I "$(pg_config --includedir)" -lpq -lfourtuple -o libpq && ./libpq 127.0.0.1 5432 "user=postgres" 10
 *
 * opens 10 connections at the same time, and prints their source ports as the server sees them. The strategy is full-range: its one
 * connect() fails only if no port is left, and needs no other socket. */
#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <fourtuple.h>
#include <libpq-fe.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct sockaddr_in destination = {.sin_family = AF_INET};
static fourtuple_dialer *dialer;
static struct fourtuple_error error;

int connect(int fd, const struct sockaddr *address, socklen_t length) {
    int (*next)(int, const struct sockaddr *, socklen_t);
    *(void **)&next = dlsym(RTLD_NEXT, "connect");
    /* Each dialer has one destination; all other sockets stay as they are. */
    const struct sockaddr_in *to = (const struct sockaddr_in *)address;
    fourtuple_attempt *attempt;
    if (dialer == NULL || address->sa_family != AF_INET || to->sin_addr.s_addr != destination.sin_addr.s_addr ||
        to->sin_port != destination.sin_port || fourtuple_prepare(dialer, fd, &attempt, &error) < 0)
        return next(fd, address, length);
    int result = next(fd, address, length), errnum = errno;
    if (result < 0 && errnum != EINPROGRESS && errnum != EINTR)
        fourtuple_next(attempt, fd, errnum, &error); /* the cause, for the program */
    fourtuple_settle(attempt, fd);
    errno = errnum;
    return result;
}

int main(int argc, char **argv) {
    if (argc != 5 || inet_pton(AF_INET, argv[1], &destination.sin_addr) != 1)
        return 2;
    destination.sin_port = htons((uint16_t)atoi(argv[2]));
    struct fourtuple_settings settings = {.strategy = "full-range"};
    if (fourtuple_dialer_new((struct sockaddr *)&destination, sizeof destination, &settings, &dialer, &error) < 0) {
        fprintf(stderr, "%s\n", error.message);
        return 1;
    }
    char words[256];
    snprintf(words, sizeof words, "hostaddr=%s port=%s sslmode=disable gssencmode=disable %s", argv[1], argv[2], argv[3]);
    int wanted = atoi(argv[4]), opened = 0;
    PGconn **connections = calloc((size_t)wanted, sizeof *connections);
    while (opened < wanted) {
        PGconn *connection = PQconnectdb(words);
        connections[opened++] = connection;
        if (PQstatus(connection) != CONNECTION_OK) {
            fprintf(stderr, "%s\n", error.kind == FOURTUPLE_PORTS_EXHAUSTED ? error.message : PQerrorMessage(connection));
            break;
        }
        PGresult *result = PQexec(connection, "SELECT inet_client_port()");
        printf("%s\n", PQgetvalue(result, 0, 0));
        PQclear(result);
    }
    int failed = PQstatus(connections[opened - 1]) != CONNECTION_OK;
    for (int i = 0; i < opened; i++)
        PQfinish(connections[i]);
    free(connections);
    fourtuple_dialer_free(dialer);
    return failed;
}
