// A client that knows nothing of fourtuple, for the tests of `fourtuple run`. Prints what its calls return.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define LOCAL_PORT_RANGE 51
#define NO_PORT 24
#define MPTCP 262
#define SOL_MPTCP 284
#define MPTCP_INFO 1

static struct sockaddr_in destination;

static struct sockaddr_in loopback(int port) {
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port)};
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return address;
}

static int dial(int fd) { return connect(fd, (struct sockaddr *)&destination, sizeof destination); }

static int tcp(void) { return socket(AF_INET, SOCK_STREAM, 0); }

static int port_of(int fd) {
  struct sockaddr_in address = {0};
  socklen_t length = sizeof address;
  if (getsockname(fd, (struct sockaddr *)&address, &length) != 0) return -1;
  return ntohs(address.sin_port);
}

static int bind_to(int fd, struct sockaddr_in address) {
  return bind(fd, (struct sockaddr *)&address, sizeof address);
}

static const char *result(int value) { return value == 0 ? "ok" : strerrorname_np(errno); }

static const char *has_port(int fd) { return port_of(fd) > 0 ? "with a port" : "without a port"; }

// Prints a name and the results of two calls. Macro: the calls are made in this order.
#define SHOW(name, first, second) \
  do { \
    const char *one = (first), *two = (second); \
    printf("%s %s, %s\n", name, one, two); \
  } while (0)

// Opens connections and keeps them. Prints the number of failures by errno, and the ports.
static void fill(int number, int bound) {
  int failed = 0, unavailable = 0;
  int *ports = calloc(number, sizeof *ports);
  for (int i = 0; i < number; i++) {
    int fd = tcp();
    if ((bound && bind_to(fd, loopback(0)) != 0) || dial(fd) != 0) {
      failed++;
      unavailable += errno == EADDRNOTAVAIL;
    } else {
      ports[i] = port_of(fd);
    }
  }
  printf("%d %d", failed, unavailable);
  for (int i = 0; i < number; i++)
    if (ports[i]) printf(" %d", ports[i]);
  printf("\n");
}

static void names(void) {
  int fd = tcp();
  printf("bind %s\n", result(bind_to(fd, loopback(0))));
  int port = port_of(fd);
  printf("port %d\n", port > 0);
  printf("again %s\n", result(bind_to(fd, loopback(0))));
  SHOW("listen", result(listen(fd, 1)), port_of(fd) == port ? "same port" : "another port");
  int client = tcp();
  struct sockaddr_in own = loopback(port);
  printf("connect %s\n", result(connect(client, (struct sockaddr *)&own, sizeof own)));
  // A bind() that fails must leave the socket as it was.
  int second = tcp();
  printf("used %s\n", result(bind_to(second, loopback(port))));
  printf("unbound %d\n", port_of(second));
  printf("retry %s\n", result(bind_to(second, loopback(0))));
  printf("connect %s\n", result(dial(second)));
  int foreign = tcp();
  struct sockaddr_in remote = loopback(0);
  remote.sin_addr.s_addr = htonl(0xc0000207);
  printf("foreign %s\n", result(bind_to(foreign, remote)));
  printf("unbound %d\n", port_of(foreign));
  SHOW("retry", result(bind_to(foreign, loopback(0))), has_port(foreign));
  int any = tcp();
  struct sockaddr_in wildcard = loopback(0);
  wildcard.sin_addr.s_addr = 0;
  SHOW("any", result(bind_to(any, wildcard)), has_port(any));
  int twice = tcp();
  bind_to(twice, loopback(0));
  printf("twice %s\n", result(bind_to(twice, loopback(0))));
  int listening = tcp();
  bind_to(listening, loopback(0));
  SHOW("listen", result(listen(listening, 1)), has_port(listening));
  int six = socket(AF_INET6, SOCK_STREAM, 0);
  struct sockaddr_in6 address = {.sin6_family = AF_INET6, .sin6_addr = IN6ADDR_LOOPBACK_INIT};
  printf("six %s\n", result(bind(six, (struct sockaddr *)&address, sizeof address)));
  socklen_t length = sizeof address;
  SHOW("six", result(getsockname(six, (struct sockaddr *)&address, &length)), address.sin6_port ? "port" : "no port");
}

static void errors(void) {
  int fd = tcp();
  errno = 77;
  int done = dial(fd) == 0 && port_of(fd) > 0;
  printf("errno %d %d\n", done, errno);
  printf("again %s\n", result(dial(fd)));
  printf("closed %s\n", result(dial(-1)));
  printf("bad address %s\n", result(connect(tcp(), (void *)8, sizeof destination)));
  printf("bad bind %s\n", result(bind(tcp(), (void *)8, sizeof destination)));
  printf("short %s\n", result(connect(tcp(), (struct sockaddr *)&destination, 3)));
  printf("no socket %s\n", result(dial(0)));
  printf("name %s\n", result(getsockname(-1, (void *)8, (void *)8)));
  socklen_t length = sizeof destination;
  printf("bad name %s\n", result(getsockname(fd, (void *)8, &length)));
  struct sockaddr_in refused = loopback(1);
  printf("refused %s\n", result(connect(tcp(), (struct sockaddr *)&refused, sizeof refused)));
  struct sockaddr dissolve = {.sa_family = AF_UNSPEC};
  printf("dissolve %s\n", result(connect(fd, &dissolve, sizeof dissolve)));
  printf("reuse %s\n", result(dial(fd)));
}

static void options(void) {
  int fd = tcp(), on = 1;
  uint32_t range = 20100 | 20131 << 16;
  setsockopt(fd, SOL_IP, LOCAL_PORT_RANGE, &range, sizeof range);
  setsockopt(fd, SOL_IP, NO_PORT, &on, sizeof on);
  SHOW("bind", result(bind_to(fd, loopback(0))), has_port(fd));
  printf("connect %s\n", result(dial(fd)));
  printf("window %d\n", port_of(fd) >= 20100 && port_of(fd) <= 20131);
  int other = tcp();
  setsockopt(other, SOL_IP, NO_PORT, &on, sizeof on);
  SHOW("own", result(bind_to(other, loopback(0))), has_port(other));
  SHOW("own", result(dial(other)), has_port(other));
}

static void kinds(void) {
  int udp = socket(AF_INET, SOCK_DGRAM, 0);
  SHOW("udp", result(dial(udp)), has_port(udp));
  int bound = socket(AF_INET, SOCK_DGRAM, 0);
  SHOW("udp", result(bind_to(bound, loopback(0))), has_port(bound));
  int multipath = socket(AF_INET, SOCK_STREAM, MPTCP);
  if (multipath >= 0) SHOW("mptcp", result(dial(multipath)), has_port(multipath));
  int fast = tcp();
  errno = 0;
  long sent = sendto(fast, "x", 1, MSG_FASTOPEN, (struct sockaddr *)&destination, sizeof destination);
  printf("fast open %d %s\n", sent == 1, result(0));
  int flags = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, IPPROTO_TCP);
  int started = dial(flags) == 0 || errno == EINPROGRESS;
  struct pollfd entry = {flags, POLLOUT, 0};
  poll(&entry, 1, 5000);
  int error = -1;
  socklen_t length = sizeof error;
  getsockopt(flags, SOL_SOCKET, SO_ERROR, &error, &length);
  printf("non-blocking %d %d\n", started, error);
  int pair[2];
  printf("unix %s\n", result(socketpair(AF_UNIX, SOCK_STREAM, 0, pair)));
}

// Returns whether a connected socket speaks MPTCP; a socket that fell back to TCP has no MPTCP_INFO.
static int is_multipath(int fd) {
  char info[256];
  socklen_t length = sizeof info;
  return getsockopt(fd, SOL_MPTCP, MPTCP_INFO, info, &length) == 0;
}

// Connects MPTCP sockets to an MPTCP listener and exchanges bytes. Prints how many connections were MPTCP on both sides.
static void multipath(int number) {
  int listener = socket(AF_INET, SOCK_STREAM, MPTCP), on = 1;
  if (listener < 0) {
    printf("absent\n");
    return;
  }
  setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (bind_to(listener, loopback(4001)) != 0 || listen(listener, 64) != 0) perror("listen");
  destination = loopback(4001);
  int clients = 0, servers = 0, answered = 0;
  for (int i = 0; i < number; i++) {
    int client = socket(AF_INET, SOCK_STREAM, MPTCP);
    if (dial(client) != 0) perror("connect");
    // The way cgroup learns the source address of a destination from its first connect, in the background.
    usleep(3000);
    int server = accept(listener, NULL, NULL);
    char byte = 0;
    if (write(client, "x", 1) == 1 && read(server, &byte, 1) == 1 && write(server, &byte, 1) == 1)
      answered += read(client, &byte, 1) == 1 && byte == 'x';
    clients += is_multipath(client);
    servers += is_multipath(server);
  }
  printf("clients %d, servers %d, answered %d\n", clients, servers, answered);
}

static atomic_int failures;

static void *many(void *number) {
  for (long i = 0; i < (long)number; i++) {
    int fd = tcp();
    if (dial(fd) != 0) failures++;
    close(fd);
  }
  return NULL;
}

static void threads(void) {
  pthread_t thread[8];
  for (int i = 0; i < 8; i++) pthread_create(&thread[i], NULL, many, (void *)20L);
  for (int i = 0; i < 8; i++) pthread_join(thread[i], NULL);
  printf("failures %d\n", failures);
}

static int shared_fd = -1;
static atomic_int is_over;

static void *closer(void *nothing) {
  while (!is_over) {
    int fd = shared_fd;
    if (fd >= 0) close(fd);
    shared_fd = -1;
  }
  return nothing;
}

// A thread closes sockets while another connects them: each connect() succeeds or fails with EBADF.
static void races(void) {
  pthread_t thread;
  pthread_create(&thread, NULL, closer, NULL);
  int other = 0;
  for (int i = 0; i < 200; i++) {
    int fd = tcp();
    shared_fd = fd;
    if (dial(fd) != 0 && errno != EBADF) other++;
    while (shared_fd >= 0) usleep(10);
  }
  is_over = 1;
  pthread_join(thread, NULL);
  printf("other %d\n", other);
}

static void on_alarm(int number) { (void)number; }

// Signals with a handler and SA_RESTART while sockets connect.
static void signals(void) {
  struct sigaction action = {.sa_handler = on_alarm, .sa_flags = SA_RESTART};
  sigaction(SIGALRM, &action, NULL);
  struct itimerval timer = {{0, 200}, {0, 200}};
  setitimer(ITIMER_REAL, &timer, NULL);
  int other = 0;
  for (int i = 0; i < 200; i++) {
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    if (dial(fd) != 0 && errno != EINPROGRESS) other++;
    close(fd);
  }
  printf("other %d\n", other);
}

static void children(const char *self, char **arguments) {
  int failed = 0;
  for (int i = 0; i < 100; i++) {
    pid_t child = i % 2 ? vfork() : fork();
    if (child == 0) {
      if (i % 10 < 8) _exit(dial(tcp()) != 0);
      execv(self, (char *[]){(char *)self, "once", arguments[2], NULL});
      _exit(3);
    }
    int status = -1;
    waitpid(child, &status, 0);
    failed += status != 0;
  }
  // Children at the same time.
  for (int i = 0; i < 100; i++)
    if (fork() == 0) _exit(dial(tcp()) != 0);
  int status;
  while (wait(&status) > 0) failed += status != 0;
  printf("failed %d\n", failed);
}

static uint64_t now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1000000000ull + time.tv_nsec;
}

static int ascending(const void *one, const void *two) {
  uint64_t a = *(const uint64_t *)one, b = *(const uint64_t *)two;
  return (a > b) - (a < b);
}

// Prints the medians of connect(), of socket() and connect(), and of getsockname() after it, in nanoseconds.
static void cost(int number, int bound) {
  uint64_t *times[3];
  for (int i = 0; i < 3; i++) times[i] = calloc(number, sizeof *times[i]);
  if (bound) bind_to(tcp(), loopback(0));
  for (int i = 0; i < number; i++) {
    uint64_t begun = now();
    int fd = tcp();
    uint64_t opened = now();
    int failed = dial(fd);
    uint64_t connected = now();
    if (failed || port_of(fd) < 0) exit(1);
    times[0][i] = connected - opened;
    times[1][i] = connected - begun;
    times[2][i] = now() - connected;
    struct linger reset = {1, 0};
    setsockopt(fd, SOL_SOCKET, SO_LINGER, &reset, sizeof reset);
    close(fd);
  }
  for (int i = 0; i < 3; i++) {
    qsort(times[i], number, sizeof *times[i], ascending);
    printf("%llu ", (unsigned long long)times[i][number / 2]);
  }
  printf("\n");
}

// Runs children with one connect each, 64 at a time. Prints the number that failed, and waits for the end of the input.
static void crowd(int number) {
  int failed = 0, status;
  for (int i = 0; i < number + 64; i++) {
    if (i >= 64) {
      wait(&status);
      failed += status != 0;
    }
    if (i < number && fork() == 0) {
      int fd = tcp();
      _exit(dial(fd) != 0 || port_of(fd) < 0);
    }
  }
  printf("failed %d\n", failed);
  fflush(stdout);
  read(0, &status, 1);
}

// Kills the supervisor as soon as the program runs, and connects.
static int orphan(void) {
  kill(getppid(), SIGKILL);
  return dial(tcp()) != 0;
}

// Connects until the input ends, and prints the number of failures then, with the errno of the last one.
static void until_end(void) {
  long failed = 0, done = 0;
  const char *last = "";
  struct pollfd input = {0, POLLIN, 0};
  printf("ready\n");
  fflush(stdout);
  // On a busy machine the input may end before the first turn.
  do {
    int fd = tcp();
    struct linger reset = {1, 0};
    setsockopt(fd, SOL_SOCKET, SO_LINGER, &reset, sizeof reset);
    if (dial(fd) != 0) {
      failed++;
      last = strerrorname_np(errno);
    }
    done++;
    close(fd);
  } while (poll(&input, 1, 1) == 0);
  printf("failed %ld of %d%s%s\n", failed, done > 0, failed ? ", last " : "", last);
}

int main(int count, char **arguments) {
  if (count < 3) return 2;
  struct rlimit limit;
  getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
  const char *what = arguments[1];
  destination = loopback(atoi(arguments[2]));
  int number = count > 3 ? atoi(arguments[3]) : 0;
  if (!strcmp(what, "fill")) fill(number, 0);
  else if (!strcmp(what, "bound")) fill(number, 1);
  else if (!strcmp(what, "cost")) cost(number, count > 4);
  else if (!strcmp(what, "crowd")) crowd(number);
  else if (!strcmp(what, "names")) names();
  else if (!strcmp(what, "errors")) errors();
  else if (!strcmp(what, "options")) options();
  else if (!strcmp(what, "kinds")) kinds();
  else if (!strcmp(what, "multipath")) multipath(number);
  else if (!strcmp(what, "threads")) threads();
  else if (!strcmp(what, "races")) races();
  else if (!strcmp(what, "signals")) signals();
  else if (!strcmp(what, "children")) children("/proc/self/exe", arguments);
  else if (!strcmp(what, "until-end")) until_end();
  else if (!strcmp(what, "orphan")) return orphan();
  else if (!strcmp(what, "once")) return dial(tcp()) != 0;
  else return 2;
  return 0;
}
