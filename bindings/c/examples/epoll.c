/* An event loop with libfourtuple: connects to an address, reads until the server closes, and repeats this.
 *
 *     cc epoll.c -lfourtuple -o epoll && ./epoll 127.0.0.1 8080 1000 16
 *
 * opens 1,000 connections, at most 16 at the same time. */
#include <arpa/inet.h>
#include <errno.h>
#include <fourtuple.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

/* A connection: attempt is NULL after the handshake. */
struct connection {
    int fd;
    fourtuple_attempt *attempt;
    struct fourtuple_report report;
};

static struct sockaddr_in destination = {.sin_family = AF_INET};
static fourtuple_dialer *dialer;
static int events;

static void fail(const char *call) {
    perror(call);
    exit(1);
}

static int open_socket(void) {
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0)
        fail("socket");
    return fd;
}

/* Ends a connection that failed, and prints why. */
static int failed(struct connection *connection, const struct fourtuple_error *error) {
    fprintf(stderr, "%s%s\n", error->message, error->retryable ? " (may succeed later)" : "");
    fourtuple_abandon(connection->attempt);
    close(connection->fd);
    connection->attempt = NULL;
    connection->fd = -1;
    return -1;
}

/* Calls connect() until a port is found; errnum is the failure of the connect() before, 0 for the first one. */
static int go_on(struct connection *connection, int errnum) {
    struct fourtuple_error error;
    for (;;) {
        if (errnum != 0) {
            int next = fourtuple_next(connection->attempt, connection->fd, errnum, &error);
            if (next == FOURTUPLE_FRESH_SOCKET) {
                close(connection->fd); /* leaves the epoll too */
                connection->fd = open_socket();
                next = fourtuple_renew(connection->attempt, connection->fd, &error);
            }
            if (next < 0)
                return failed(connection, &error);
        }
        if (connect(connection->fd, (const struct sockaddr *)&destination, sizeof destination) == 0 || errno == EINPROGRESS)
            break;
        errnum = errno;
    }
    struct epoll_event event = {.events = EPOLLOUT, .data.ptr = connection};
    if (epoll_ctl(events, EPOLL_CTL_ADD, connection->fd, &event) < 0)
        fail("epoll_ctl");
    return 0;
}

static int begin(struct connection *connection) {
    struct fourtuple_error error;
    connection->fd = open_socket();
    if (fourtuple_prepare(dialer, connection->fd, &connection->attempt, &error) < 0)
        return failed(connection, &error);
    return go_on(connection, 0);
}

/* Handles an event. Returns 1 if the connection was served and closed, -1 if it failed, 0 if it goes on. */
static int handle(struct connection *connection) {
    struct fourtuple_error error;
    if (connection->attempt != NULL) {
        int errnum = 0;
        socklen_t length = sizeof errnum;
        if (getsockopt(connection->fd, SOL_SOCKET, SO_ERROR, &errnum, &length) < 0)
            fail("getsockopt");
        if (errnum != 0)
            return go_on(connection, errnum);
        fourtuple_attempt *attempt = connection->attempt;
        connection->attempt = NULL;
        if (fourtuple_finish(attempt, connection->fd, &connection->report, &error) < 0)
            return failed(connection, &error);
        struct epoll_event event = {.events = EPOLLIN, .data.ptr = connection};
        if (epoll_ctl(events, EPOLL_CTL_MOD, connection->fd, &event) < 0)
            fail("epoll_ctl");
        return 0;
    }
    char bytes[4096];
    ssize_t length = read(connection->fd, bytes, sizeof bytes);
    if (length > 0 || (length < 0 && (errno == EAGAIN || errno == EINTR)))
        return 0;
    close(connection->fd);
    /* The server closed first, so the port is free. */
    if (fourtuple_release(dialer, (const struct sockaddr *)&connection->report.source, connection->report.source_length, &error) < 0)
        fprintf(stderr, "%s\n", error.message);
    return length == 0 ? 1 : -1;
}

int main(int argc, char **argv) {
    if (argc != 5 && argc != 6) {
        fprintf(stderr, "usage: %s ADDRESS PORT CONNECTIONS AT-THE-SAME-TIME [STRATEGY]\n", argv[0]);
        return 2;
    }
    long wanted = atol(argv[3]), width = atol(argv[4]);
    destination.sin_port = htons((uint16_t)atoi(argv[2]));
    if (inet_pton(AF_INET, argv[1], &destination.sin_addr) != 1 || wanted < 1 || width < 1) {
        fprintf(stderr, "%s: expected an IPv4 address, a port and two numbers above 0\n", argv[0]);
        return 2;
    }
    struct fourtuple_error error;
    struct fourtuple_settings settings = {.strategy = argc == 6 ? argv[5] : NULL};
    if (fourtuple_dialer_new((const struct sockaddr *)&destination, sizeof destination, &settings, &dialer, &error) < 0) {
        fprintf(stderr, "%s\n", error.message);
        return 1;
    }
    events = epoll_create1(EPOLL_CLOEXEC);
    if (events < 0)
        fail("epoll_create1");
    struct connection *connections = calloc((size_t)width, sizeof *connections);
    if (connections == NULL)
        fail("calloc");
    long begun = 0, served = 0, lost = 0;
    for (; begun < wanted && begun < width; begun++)
        if (begin(&connections[begun]) < 0)
            lost++;
    while (served + lost < begun) {
        struct epoll_event ready[64];
        int count = epoll_wait(events, ready, 64, -1);
        if (count < 0 && errno != EINTR)
            fail("epoll_wait");
        for (int i = 0; i < count; i++) {
            struct connection *connection = ready[i].data.ptr;
            int result = handle(connection);
            if (result == 0)
                continue;
            served += result == 1;
            lost += result < 0;
            if (begun < wanted) {
                begun++;
                if (begin(connection) < 0)
                    lost++;
            }
        }
    }
    printf("%ld served, %ld failed\n", served, lost);
    free(connections);
    close(events);
    fourtuple_dialer_free(dialer);
    return lost > 0;
}
