/* libcurl with libfourtuple: CURLOPT_OPENSOCKETFUNCTION opens each socket and prepares it, and libcurl calls connect() itself.
 *
 *     cc curl.c -lcurl -lfourtuple -o curl && ./curl 127.0.0.1 8080 10
 *
 * sends 10 requests, each on a connection of its own, and prints their source ports. The strategy is full-range: its one connect() fails
 * only if no port is left, so nothing has to be repeated that libcurl does not repeat. Another strategy can follow: kernel-default, for
 * comparisons. */
#include <arpa/inet.h>
#include <curl/curl.h>
#include <errno.h>
#include <fourtuple.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static fourtuple_dialer *dialer;
/* The attempt of the last socket, for the cause of a failure. */
static fourtuple_attempt *attempt;

static curl_socket_t open_socket(void *user, curlsocktype purpose, struct curl_sockaddr *address) {
    (void)user;
    (void)purpose;
    int fd = socket(address->family, address->socktype | SOCK_CLOEXEC, address->protocol);
    struct fourtuple_error error;
    /* Without the option (before Linux 6.3) the socket stays as it is. */
    if (fd >= 0 && fourtuple_prepare(dialer, fd, &attempt, &error) < 0 && error.kind != FOURTUPLE_NOT_SUPPORTED) {
        fprintf(stderr, "%s\n", error.message);
        close(fd);
        return CURL_SOCKET_BAD;
    }
    return fd;
}

static int close_socket(void *user, curl_socket_t fd) {
    (void)user;
    return close(fd);
}

static size_t ignore(char *bytes, size_t size, size_t count, void *user) {
    (void)bytes;
    (void)user;
    return size * count;
}

int main(int argc, char **argv) {
    struct sockaddr_in destination = {.sin_family = AF_INET};
    if ((argc != 4 && argc != 5) || inet_pton(AF_INET, argv[1], &destination.sin_addr) != 1)
        return 2;
    destination.sin_port = htons((uint16_t)atoi(argv[2]));
    struct fourtuple_settings settings = {.strategy = argc == 5 ? argv[4] : "full-range"};
    struct fourtuple_error error;
    if (fourtuple_dialer_new((struct sockaddr *)&destination, sizeof destination, &settings, &dialer, &error) < 0) {
        fprintf(stderr, "%s\n", error.message);
        return 1;
    }
    curl_global_init(CURL_GLOBAL_DEFAULT);
    CURL *curl = curl_easy_init();
    char url[64];
    snprintf(url, sizeof url, "http://%s:%s/", argv[1], argv[2]);
    curl_easy_setopt(curl, CURLOPT_URL, url);
    curl_easy_setopt(curl, CURLOPT_FRESH_CONNECT, 1L);
    curl_easy_setopt(curl, CURLOPT_WRITEFUNCTION, ignore);
    curl_easy_setopt(curl, CURLOPT_OPENSOCKETFUNCTION, open_socket);
    curl_easy_setopt(curl, CURLOPT_CLOSESOCKETFUNCTION, close_socket);
    int result = 0;
    for (int i = 0; i < atoi(argv[3]) && result == 0; i++) {
        CURLcode code = curl_easy_perform(curl);
        long value = 0;
        if (code == CURLE_OK) {
            curl_easy_getinfo(curl, CURLINFO_LOCAL_PORT, &value);
            printf("%ld\n", value);
        } else {
            result = 1;
            curl_easy_getinfo(curl, CURLINFO_OS_ERRNO, &value);
            /* The cause of a failed connect(), with the sockets that hold the ports. */
            if (attempt != NULL && value != 0 && value != EINPROGRESS && fourtuple_next(attempt, 0, (int)value, &error) < 0)
                fprintf(stderr, "%s\n", error.message);
            else
                fprintf(stderr, "%s\n", curl_easy_strerror(code));
        }
        fourtuple_abandon(attempt);
        attempt = NULL;
    }
    curl_easy_cleanup(curl);
    curl_global_cleanup();
    fourtuple_dialer_free(dialer);
    return result;
}
