/* libfourtuple: prepares TCP sockets for connect(), so that the source port is found quickly.
 *
 * The program opens the socket and calls connect() itself, blocking or in an event loop:
 *
 *     struct fourtuple_error error;
 *     fourtuple_attempt *attempt;
 *     int fd = socket(...);
 *     if (fourtuple_prepare(dialer, fd, &attempt, &error) < 0) ...
 *     while (connect(fd, ...) < 0 && errno != EINPROGRESS) {
 *         int next = fourtuple_next(attempt, fd, errno, &error);
 *         if (next == FOURTUPLE_FRESH_SOCKET) {
 *             close(fd);
 *             fd = socket(...);
 *             next = fourtuple_renew(attempt, fd, &error);
 *         }
 *         if (next < 0) { fourtuple_abandon(attempt); close(fd); ... }
 *     }
 *     fourtuple_finish(attempt, fd, &report, &error);
 *
 * Each function that returns int returns a negative enum fourtuple_kind if it fails, and describes the failure in *error, which may be
 * NULL. Linux only. docs/c.md describes the library.
 */
#ifndef FOURTUPLE_H
#define FOURTUPLE_H

#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The cause of a failure. It depends on the failed call, because one errno has different meanings in different calls. */
enum fourtuple_kind {
    FOURTUPLE_FAILED = -1,           /* any other failure: see errnum and message */
    FOURTUPLE_PORTS_EXHAUSTED = -2,  /* no source port is free; the message counts the sockets that hold them */
    FOURTUPLE_SOURCE_NOT_LOCAL = -3, /* the source is not an address of this host */
    FOURTUPLE_TUPLE_BUSY = -4,       /* the fixed source port is in use */
    FOURTUPLE_REFUSED = -5,          /* ECONNREFUSED */
    FOURTUPLE_SELF_CONNECT = -6,     /* the kernel connected the socket to itself */
    FOURTUPLE_TIMED_OUT = -7,        /* ETIMEDOUT */
    FOURTUPLE_NOT_SUPPORTED = -8,    /* this kernel lacks an option that the strategy needs; never with "auto" */
    FOURTUPLE_INVALID = -9           /* an invalid argument or setting */
};

struct fourtuple_error {
    int32_t kind;      /* enum fourtuple_kind */
    int32_t errnum;    /* the errno of the failed call; 0 if there is none */
    int32_t retryable; /* 1 if the same connect may succeed later without a change of the settings or of the host */
    char message[372];
};

/* Results of fourtuple_next(). */
#define FOURTUPLE_SAME_SOCKET 1  /* call connect() again on the same socket */
#define FOURTUPLE_FRESH_SOCKET 2 /* close the socket, open another one and pass it to fourtuple_renew() */

/* Settings of a dialer. A member that is NULL or 0 has its default. */
struct fourtuple_settings {
    const char *strategy;    /* "auto" (default), "full-range", "random-window:WIDTH", "select-test-repeat", "kernel-default" */
    const char *sources;     /* source addresses and networks, such as "10.0.0.7,10.0.1.0/28"; default: chosen by route */
    const char *device;      /* network device or VRF (SO_BINDTODEVICE) */
    uint16_t source_port;    /* a fixed source port */
    uint16_t without_census; /* 1: do not count sockets for FOURTUPLE_PORTS_EXHAUSTED */
    uint32_t reserved;       /* 0 */
};

/* The source of a connection. */
struct fourtuple_report {
    struct sockaddr_storage source;
    socklen_t source_length;
    uint32_t tries; /* calls of bind() or connect() to get a port, at least 1 */
};

/* A dialer to one destination. Threads may share it. */
typedef struct fourtuple_dialer fourtuple_dialer;

/* A connect in progress. One thread at a time may use it. It may outlive its dialer. */
typedef struct fourtuple_attempt fourtuple_attempt;

/* Returns the version of the library, such as "0.1.0". */
const char *fourtuple_version(void);

/* Makes a dialer, to be freed with fourtuple_dialer_free(). The strategy "auto" probes the kernel: once per network namespace, with up
 * to 40 connections over loopback. Reads the ports in use from the kernel, 1.2 us for each socket on the destination: keep the dialer. */
int fourtuple_dialer_new(const struct sockaddr *destination, socklen_t length, const struct fourtuple_settings *settings,
                         fourtuple_dialer **dialer, struct fourtuple_error *error);
void fourtuple_dialer_free(fourtuple_dialer *dialer);

/* Writes the strategy and how it was chosen, cut to size - 1 bytes. Returns the length of the whole text. */
int fourtuple_dialer_choice(const fourtuple_dialer *dialer, char *buffer, size_t size);

/* Sets the options of a new socket for its first connect(). On success *attempt must be passed to fourtuple_finish() or
 * fourtuple_abandon(). */
int fourtuple_prepare(const fourtuple_dialer *dialer, int fd, fourtuple_attempt **attempt, struct fourtuple_error *error);

/* Sets the options for the next connect() after one failed with errnum: errno, or SO_ERROR after a wait. Returns FOURTUPLE_SAME_SOCKET,
 * FOURTUPLE_FRESH_SOCKET or the reason why the dial ends. EINPROGRESS is not a failure and must not be passed. */
int fourtuple_next(fourtuple_attempt *attempt, int fd, int errnum, struct fourtuple_error *error);

/* Sets the options of a fresh socket. */
int fourtuple_renew(fourtuple_attempt *attempt, int fd, struct fourtuple_error *error);

/* Ends an attempt after connect() succeeded or returned EINPROGRESS and the handshake succeeded, and frees it, also if it fails.
 * report may be NULL. */
int fourtuple_finish(fourtuple_attempt *attempt, int fd, struct fourtuple_report *report, struct fourtuple_error *error);

/* Ends and frees an attempt without a connection. The port of the last connect() stays marked as in use until the dialer reads the ports of
 * the kernel again, because the connection may exist. With several sources, 100 ms or more after fourtuple_prepare() or fourtuple_renew() this
 * counts as a handshake without an answer: the next attempts use other sources first. */
void fourtuple_abandon(fourtuple_attempt *attempt);

/* Ends and frees an attempt whose outcome the program does not know, because another library connects the socket. Call it before close(fd).
 * A connection is recorded as by fourtuple_finish(). Without one the port is free for the next attempt at once. While the handshake is in
 * progress, or if fd is not a TCP socket, the port stays marked as after fourtuple_abandon(). */
void fourtuple_settle(fourtuple_attempt *attempt, int fd);

/* Marks the port of a closed connection as free, for connections that the peer closed first. Optional. */
int fourtuple_release(const fourtuple_dialer *dialer, const struct sockaddr *source, socklen_t length,
                      struct fourtuple_error *error);

/* Reads the ports in use from the kernel again. */
int fourtuple_refresh(const fourtuple_dialer *dialer, struct fourtuple_error *error);

/* A strategy as a pure function, for programs that make all calls themselves, and for the vectors. */
struct fourtuple_strategy {
    int32_t kind;            /* 1: kernel default, 2: select, test, repeat, 3: random window, 4: full range */
    uint16_t width, tries;   /* width of 3; tries of 2 and 3; at least 1 */
    int32_t then_full_range; /* of 3 */
};

struct fourtuple_step {
    int32_t kind;       /* 0: connect() searches, 1: it searches the window low to high, 2: bind() to the port low */
    uint16_t low, high;
};

/* Sets *strategy to the strategy that "auto" takes on a kernel whose support for IP_LOCAL_PORT_RANGE is found: 0 absent, 1 search by parity, 2
 * linear search, 3 unproven. ports_known: whether the port range of the namespace could be read. */
int fourtuple_strategy_for_kernel(int32_t found, int32_t ports_known, struct fourtuple_strategy *strategy);

/* Returns 1 and the step after tried steps found their ports in use, or 0 if the dial fails. low and high are the port range of the
 * namespace; *random is the state of the random number generator: any number at first. */
int fourtuple_step(const struct fourtuple_strategy *strategy, uint32_t tried, uint16_t low, uint16_t high, uint64_t *random,
                   struct fourtuple_step *step);

#ifdef __cplusplus
}
#endif

#endif
