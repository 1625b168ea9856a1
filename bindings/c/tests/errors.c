/* Fills the 8 ports of a namespace to ADDRESS PORT, and checks the errors of a full range, of invalid arguments and of a foreign source. With
 * STRATEGY and COUNT it makes COUNT connects, and ends each attempt with fourtuple_abandon() although its connect() succeeded. */
#include <arpa/inet.h>
#include <errno.h>
#include <fourtuple.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define CHECK(condition)                                                                                                       \
    do {                                                                                                                       \
        if (!(condition)) {                                                                                                    \
            fprintf(stderr, "line %d: %s: %d %s\n", __LINE__, #condition, error.kind, error.message);                          \
            exit(1);                                                                                                           \
        }                                                                                                                      \
    } while (0)

_Static_assert(sizeof(struct fourtuple_error) == 384 && offsetof(struct fourtuple_error, message) == 12, "layout");
_Static_assert(sizeof(struct fourtuple_settings) == 3 * sizeof(char *) + 8, "layout");
_Static_assert(sizeof(struct fourtuple_report) == 136 && offsetof(struct fourtuple_report, tries) == 132, "layout");
_Static_assert(sizeof(struct fourtuple_strategy) == 12 && sizeof(struct fourtuple_step) == 8, "layout");

static struct fourtuple_error error;
/* Calls of connect() that failed, each of which the next try may make good. */
static int failed_connects;
static struct sockaddr_in destination = {.sin_family = AF_INET};

/* Connects with a blocking socket, and ends the attempt with fourtuple_finish() or fourtuple_abandon(). Returns the descriptor or a kind. */
static int dial(const fourtuple_dialer *dialer, int is_abandoned) {
    fourtuple_attempt *attempt;
    struct fourtuple_report report;
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    int result = fourtuple_prepare(dialer, fd, &attempt, &error);
    while (result >= 0 && connect(fd, (struct sockaddr *)&destination, sizeof destination) < 0) {
        failed_connects++;
        result = fourtuple_next(attempt, fd, errno, &error);
        if (result == FOURTUPLE_FRESH_SOCKET) {
            close(fd);
            fd = socket(AF_INET, SOCK_STREAM, 0);
            result = fourtuple_renew(attempt, fd, &error);
        }
    }
    if (result < 0) {
        fourtuple_abandon(attempt);
        close(fd);
        return result;
    }
    if (is_abandoned) {
        fourtuple_abandon(attempt);
        return fd;
    }
    result = fourtuple_finish(attempt, fd, &report, &error);
    CHECK(result == 0 && report.tries >= 1 && report.source_length == sizeof(struct sockaddr_in));
    struct sockaddr_in source;
    socklen_t length = sizeof source;
    CHECK(getsockname(fd, (struct sockaddr *)&source, &length) == 0 && memcmp(&source, &report.source, sizeof source) == 0);
    return fd;
}

/* Prepares a socket that is never connected, and returns its port from the ledger. */
static uint32_t settle(const fourtuple_dialer *dialer) {
    fourtuple_attempt *attempt;
    uint32_t window = 0;
    socklen_t length = sizeof window;
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(fourtuple_prepare(dialer, fd, &attempt, &error) == 0);
    CHECK(getsockopt(fd, IPPROTO_IP, 51, &window, &length) == 0); /* IP_LOCAL_PORT_RANGE */
    CHECK(window >> 16 == (window & 0xffff));
    fourtuple_settle(attempt, fd);
    close(fd);
    return window >> 16;
}

static fourtuple_dialer *make(struct fourtuple_settings settings) {
    fourtuple_dialer *dialer;
    int result = fourtuple_dialer_new((struct sockaddr *)&destination, sizeof destination, &settings, &dialer, &error);
    CHECK(result == 0);
    return dialer;
}

/* The connections stay open, so a connect() from the port of one of them fails. Prints the connections and the failed connect() calls. */
static void abandon(const char *strategy, int count) {
    fourtuple_dialer *dialer = make((struct fourtuple_settings){.strategy = strategy, .without_census = 1});
    int *fds = calloc((size_t)count, sizeof *fds);
    for (int i = 0; i < count; i++) {
        fds[i] = dial(dialer, 1);
        CHECK(fds[i] >= 0);
    }
    printf("%d connections, %d failed connects\n", count, failed_connects);
    CHECK(dial(dialer, 0) == FOURTUPLE_PORTS_EXHAUSTED);
    for (int i = 0; i < count; i++)
        close(fds[i]);
    free(fds);
    fourtuple_dialer_free(dialer);
}

static void invalid(struct fourtuple_settings settings, socklen_t length, const char *word) {
    fourtuple_dialer *dialer;
    int result = fourtuple_dialer_new((struct sockaddr *)&destination, length, &settings, &dialer, &error);
    CHECK(result == FOURTUPLE_INVALID && error.kind == result && error.errnum == EINVAL && dialer == NULL && strstr(error.message, word) != NULL);
}

int main(int argc, char **argv) {
    if (argc != 3 && argc != 5)
        return 2;
    destination.sin_port = htons((uint16_t)atoi(argv[2]));
    CHECK(inet_pton(AF_INET, argv[1], &destination.sin_addr) == 1);
    if (argc == 5) {
        abandon(argv[3], atoi(argv[4]));
        return 0;
    }
    const char *strategies[] = {"auto", "full-range", "random-window:3", "kernel-default"};
    for (size_t i = 0; i < sizeof strategies / sizeof *strategies; i++) {
        fourtuple_dialer *dialer = make((struct fourtuple_settings){.strategy = strategies[i]});
        char choice[200];
        int length = fourtuple_dialer_choice(dialer, choice, sizeof choice);
        CHECK(length > 0 && (size_t)length == strlen(choice));
        int fds[8];
        for (int j = 0; j < 8; j++) {
            fds[j] = dial(dialer, 0);
            CHECK(fds[j] >= 0);
            /* With one free port, only a port that each attempt gives back is found by the next one: a ledger without a free port forgets
             * which ones are in use. */
            struct sockaddr_in held;
            socklen_t length = sizeof held;
            CHECK(getsockname(fds[j], (struct sockaddr *)&held, &length) == 0);
            for (int k = 0; i == 0 && j == 6 && k < 64; k++)
                CHECK(settle(dialer) != ntohs(held.sin_port));
        }
        CHECK(dial(dialer, 0) == FOURTUPLE_PORTS_EXHAUSTED);
        CHECK(error.errnum == EADDRNOTAVAIL && error.retryable == 1);
        CHECK(strstr(error.message, "of 8 ports 8 are established") != NULL);
        struct linger reset = {1, 0};
        for (int j = 0; j < 8; j++) {
            setsockopt(fds[j], SOL_SOCKET, SO_LINGER, &reset, sizeof reset);
            close(fds[j]);
        }
        CHECK(fourtuple_refresh(dialer, &error) == 0);
        /* The attempt outlives its dialer. */
        fourtuple_attempt *attempt;
        int fd = socket(AF_INET, SOCK_STREAM, 0);
        CHECK(fourtuple_prepare(dialer, fd, &attempt, &error) == 0);
        fourtuple_dialer_free(dialer);
        CHECK(fourtuple_next(attempt, fd, EINPROGRESS, &error) == FOURTUPLE_INVALID);
        CHECK(fourtuple_next(attempt, fd, ECONNREFUSED, &error) == FOURTUPLE_REFUSED && error.errnum == ECONNREFUSED);
        fourtuple_abandon(attempt);
        close(fd);
    }
    fourtuple_dialer *foreign = make((struct fourtuple_settings){.sources = "192.0.2.1"});
    CHECK(dial(foreign, 0) == FOURTUPLE_SOURCE_NOT_LOCAL && error.retryable == 0);
    fourtuple_dialer_free(foreign);
    invalid((struct fourtuple_settings){.strategy = "fast"}, sizeof destination, "strategy");
    invalid((struct fourtuple_settings){.sources = "eth0"}, sizeof destination, "eth0");
    invalid((struct fourtuple_settings){.reserved = 1}, sizeof destination, "reserved");
    invalid((struct fourtuple_settings){0}, 3, "short");
    CHECK(fourtuple_prepare(NULL, 0, NULL, &error) == FOURTUPLE_INVALID && fourtuple_next(NULL, 0, 1, NULL) == FOURTUPLE_INVALID);
    fourtuple_abandon(NULL);
    fourtuple_settle(NULL, -1);
    fourtuple_dialer_free(NULL);
    printf("%s\n", fourtuple_version());
    return 0;
}
