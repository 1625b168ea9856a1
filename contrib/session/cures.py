#!/usr/bin/env python3
"""Measures the time from `fourtuple doctor` to a working cure, by pasting what its first screen says under "do now".

    contrib/session/cures.py FOURTUPLE FAULTS DIRECTORY

Needs root. FAULTS is a program that makes the fault of its first argument at 10.9.0.1:8080 until it is killed. Each fault has a network
namespace of its own. Writes DIRECTORY/NAME.txt, the first screen at 80 columns, and prints a line for each fault: lines of the screen, the
finding, the command that cured it, and the time from the start of doctor until a later one has no such finding or a less severe one, or until
new connections are served that were not before.
"""
import os
import re
import shlex
import socket
import subprocess
import sys
import time

# The faults, with the sysctls of their namespaces.
FAULTS = {
    "timewait": ["net.ipv4.tcp_rfc1337=1", "net.ipv4.ip_local_port_range=40000 43999"],
    "estab": ["net.ipv4.ip_local_port_range=40000 47999"],
    "acceptq": [],
    "reuseport": [],
    "closewait": [],
    "reserved": ["net.ipv4.ip_local_reserved_ports=32868-60999"],
}
SERVER = ("10.9.0.1", 8080)
SEVERITIES = ["critical", "warning", "notice"]
# Seconds after which the slowest fault is complete.
WAIT = 100
# Commands that run until Ctrl-C, and the time for which others may run.
LASTING, LIMIT = re.compile(r"\bfix (ports|accept)\b"), 20
TRIES = 4


def doctor():
    return subprocess.run(["fourtuple", "doctor"], stdout=subprocess.PIPE, text=True).stdout


def findings(screen):
    """Returns the findings of a screen: severity and rule."""
    return re.findall(r"^(critical|warning|notice) ([A-Z]\d\d) ", screen, re.M)


def commands(screen):
    """Returns the commands under "do now". They are indented, and their effect more."""
    block = re.search(r"^do now\n((?:[ -].*\n)*)", screen, re.M)
    lines = block[1].splitlines() if block else []
    return [line[4:] for line in lines if re.match(r"    [^ ]", line) and not re.match(r"    (keep|undo): ", line)]


def served():
    """Returns how many of 20 new connections are served within a second each."""
    number = 0
    for _ in range(20):
        try:
            with socket.create_connection(SERVER, timeout=1) as client:
                client.shutdown(socket.SHUT_WR)
                number += client.recv(1) == b""
        except OSError:
            pass
    return number


def cure(name, faults):
    fault = subprocess.Popen([sys.executable, faults, name], stderr=subprocess.DEVNULL)
    running, cured = [], "no command of the screen cures it"
    try:
        end, screen, found = time.monotonic() + WAIT, "", []
        time.sleep(30)
        while (not found or found[0][0] == "notice") and time.monotonic() < end:
            time.sleep(3)
            began = time.monotonic()
            screen = doctor()
            found = findings(screen)
        before = served()
        for command in commands(screen) if found else []:
            if LASTING.search(command):
                running.append(subprocess.Popen(shlex.split(command), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
            else:
                subprocess.run(["timeout", str(LIMIT), "sh", "-c", command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
                if "sysctl" not in command and "kill" not in command:
                    continue
            for _ in range(TRIES):
                after = findings(doctor())
                worst = min([SEVERITIES.index(severity) for severity, rule in after if rule == found[0][1]], default=len(SEVERITIES))
                is_served = before < 20 and served() == 20
                if worst > SEVERITIES.index(found[0][0]) or is_served:
                    rest = ", ".join(map(" ".join, after)) or "no fault found"
                    cured = f"{time.monotonic() - began:.1f} s by `{command}` (then: {rest}{'; new connections are served' if is_served else ''})"
                    return screen, found, cured
    finally:
        for process in [*running, fault]:
            process.kill()
            process.wait()
    return screen, found, cured


def main():
    program, faults, directory = map(os.path.abspath, sys.argv[1:4])
    if len(sys.argv) == 4:
        os.makedirs(directory, exist_ok=True)
        for name in FAULTS:
            again = ["unshare", "--net", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]
            subprocess.run([*again, sys.executable, __file__, program, faults, directory, name], check=True)
        return
    name = sys.argv[4]
    # The name alone is what a user types who installed the package.
    subprocess.run(["mount", "-t", "tmpfs", "none", "/usr/local/bin"], check=True)
    subprocess.run(["cp", program, "/usr/local/bin/fourtuple"], check=True)
    for command in ("ip link set lo up", "ip addr add 10.9.0.1/32 dev lo"):
        subprocess.run(command.split(), check=True)
    for setting in FAULTS[name]:
        subprocess.run(["sysctl", "-qw", setting], check=True)
    os.environ.update(COLUMNS="80", LC_ALL="C.UTF-8")
    screen, found, cured = cure(name, faults)
    with open(os.path.join(directory, f"{name}.txt"), "w", encoding="utf-8") as file:
        file.write(screen)
    lines, first = len(screen.splitlines()), " ".join(found[0]) if found else "none"
    undo = "with undo" if "    undo: " in screen else "no undo line"
    print(f"{name:10} {lines} lines, {first}, {undo}: {cured}", flush=True)


if __name__ == "__main__":
    main()
