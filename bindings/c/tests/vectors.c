/* Executes the cases of a file of bindings/vectors and prints their number. Each case is a line. */
#include <fourtuple.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *names[] = {"", "kernel-default", "select-test-repeat", "random-window", "full-range"};
static const char *found_names[] = {"\"absent\"", "\"parity\"", "\"linear\"", "\"unproven\""};

/* Compares the steps of one case with the text of the steps, such as [null, [1, 2], 3]]. */
static int agrees(const struct fourtuple_strategy *strategy, uint64_t random, unsigned low, unsigned high, unsigned attempts,
                  const char *text) {
    char steps[4096] = "[";
    size_t length = 1;
    for (unsigned tried = 0; tried < attempts; tried++) {
        struct fourtuple_step step;
        int found = fourtuple_step(strategy, tried, (uint16_t)low, (uint16_t)high, &random, &step);
        if (found < 0)
            return 0;
        if (found == 0)
            break;
        const char *comma = tried > 0 ? ", " : "";
        size_t space = sizeof steps - length;
        if (step.kind == 0)
            length += (size_t)snprintf(steps + length, space, "%snull", comma);
        else if (step.kind == 1)
            length += (size_t)snprintf(steps + length, space, "%s[%u, %u]", comma, step.low, step.high);
        else
            length += (size_t)snprintf(steps + length, space, "%s%u", comma, step.low);
    }
    snprintf(steps + length, sizeof steps - length, "]]");
    return strncmp(steps, text, strlen(steps)) == 0;
}

int main(int argc, char **argv) {
    FILE *file = argc == 3 ? fopen(argv[2], "r") : NULL;
    if (file == NULL) {
        fprintf(stderr, "usage: %s STRATEGY FILE\n", argv[0]);
        return 2;
    }
    struct fourtuple_strategy strategy = {0};
    for (int32_t kind = 1; kind <= 4; kind++)
        if (strcmp(argv[1], names[kind]) == 0)
            strategy.kind = kind;
    int is_auto = strcmp(argv[1], "auto") == 0;
    char line[4096];
    int cases = 0;
    while (fgets(line, sizeof line, file) != NULL) {
        uint64_t seed;
        unsigned low, high, attempts, width = 0, tries = 0;
        int at = 0;
        if (sscanf(line, "[\"%" SCNx64 "\", %u, %u, %u, %n", &seed, &low, &high, &attempts, &at) != 4)
            continue;
        const char *rest = line + at;
        if (is_auto) {
            /* "FOUND", PORTS_KNOWN: the cases use the default parameters. */
            int32_t found = 0;
            while (found < 4 && strncmp(rest, found_names[found], strlen(found_names[found])) != 0)
                found++;
            int known = strstr(rest, "true, ") != NULL;
            if (fourtuple_strategy_for_kernel(found, known, &strategy) < 0)
                return 1;
        } else if (strategy.kind == 3) {
            if (sscanf(rest, "%u, %u, %n", &width, &tries, &at) != 2)
                return 1;
            rest += at;
            strategy.then_full_range = strncmp(rest, "true", 4) == 0;
        } else if (strategy.kind == 2 && sscanf(rest, "%u, ", &tries) != 1) {
            return 1;
        }
        if (!is_auto) {
            strategy.width = (uint16_t)width;
            strategy.tries = (uint16_t)tries;
        }
        rest = strchr(rest, '[');
        if (rest == NULL || !agrees(&strategy, seed, low, high, attempts, rest)) {
            fprintf(stderr, "other steps than %s", line);
            return 1;
        }
        cases++;
    }
    fclose(file);
    printf("%d\n", cases);
    return 0;
}
