#!/usr/bin/env python3
"""Soaks `fourtuple guard`: five programs under load that crosses its thresholds, beside a bare twin with the same load and no guard.

    contrib/guard-soak/soak.py FOURTUPLE DIRECTORY [--minutes 60] [--kills 20] [--upgrades 2] [--churn 200] [--ports 2000] [--nice 0]

Needs root, cgroup2, nginx, HAProxy, Node.js, a JDK, nsenter and bpftool. Each twin is a network namespace with a server and a cgroup per client;
the proxies get their load over unix sockets. Meanwhile the clients are restarted in new cgroups of the same name, cgroups with short-lived
processes come and go, and guard is killed at random moments and upgraded (by SIGHUP and by --takeover in turn). The policy names cgroups of this run
only. --nice lowers the priority of everything but guard. Writes DIRECTORY/soak.json and prints it as a table. Exit code 1: guard did harm, or something is left over.
"""
import argparse
import ctypes
import json
import os
import platform
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
CLIENTS = ["nginx", "haproxy", "node", "python", "java"]
PROXIES = CLIENTS[:2]
TWINS = ["guarded", "bare"]
PORT = 7000
# Share of the range that a client holds, by the time in its cycle: below the threshold, and above what one source address has.
SHAPE = [(0.0, 0.2), (0.3, 0.2), (0.45, 1.25), (0.7, 1.25), (0.8, 0.2), (1.0, 0.2)]
TICK = 0.1
# Longest wait for an end that must come.
PATIENCE = 300
POLICY = """every = "1s"
quiet = "15s"
[fix-ports]
cgroups = ["{scope}/guarded/*"]
destinations = ["127.0.1.0/24:7000", "127.0.2.0/24:7000"]
source = "127.0.0.16/29"
max = 40
"""
NGINX = """daemon off; master_process on; worker_processes 2; pid {room}/nginx.pid; error_log {room}/nginx-error.log error;
events {{ worker_connections 9000; }}
http {{
  log_format soak '$upstream_connect_time $status'; access_log {room}/nginx-access.log soak;
  client_body_temp_path {room}/body; proxy_temp_path {room}/proxy; fastcgi_temp_path {room}/fastcgi; uwsgi_temp_path {room}/uwsgi; scgi_temp_path {room}/scgi;
  server {{ listen unix:{room}/nginx.sock backlog=4096;
    location / {{ proxy_pass http://{address}; proxy_http_version 1.1; proxy_buffering off; proxy_read_timeout 1h; proxy_next_upstream off; }} }}
}}
"""
HAPROXY = """global
  maxconn 9000
  log stdout format raw local0
defaults
  mode tcp
  log global
  retries 0
  timeout connect 30s
  timeout client 1h
  timeout server 1h
listen soak
  bind unix@{room}/haproxy.sock backlog 4096
  log-format "%Tc %ts"
  server upstream {address}
"""


def bpf_attached(directory):
    """Returns the number of programs at connect() of a cgroup: BPF_PROG_QUERY of bpf(2), for BPF_CGROUP_INET4_CONNECT."""
    try:
        cgroup = os.open(directory, os.O_RDONLY)
    except FileNotFoundError:
        return 0
    attributes = (ctypes.c_uint32 * 16)(cgroup, 10)
    number = {"x86_64": 321, "aarch64": 280}[platform.machine()]
    failed = ctypes.CDLL(None, use_errno=True).syscall(number, 16, attributes, ctypes.sizeof(attributes))
    os.close(cgroup)
    return 0 if failed else attributes[6]


def wait_until(what, condition, patience=PATIENCE, step=0.001):
    end = time.monotonic() + patience
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(what)
        time.sleep(step)


def percentile(values, share):
    return values[min(int(len(values) * share), len(values) - 1)] if values else 0


class Twin:
    """A network namespace with a server, and the clients."""

    def __init__(self, name, soak):
        self.name, self.soak = name, soak
        self.cgroup = soak.cgroup / name
        self.cgroup.mkdir()
        self.room = soak.room / name
        self.room.mkdir()
        self.holder = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
        own = os.readlink("/proc/self/ns/net")
        wait_until("a namespace", lambda: os.readlink(f"/proc/{self.holder.pid}/ns/net") != own)
        self.programs, self.drivers, self.lock = {}, {}, threading.Lock()
        self.cpu = dict.fromkeys(CLIENTS, 0)
        top = 20000 + soak.flags.ports - 1
        self.run(["sh", "-c", "ip link set lo up; cd /proc/sys/net; echo 65535 >core/somaxconn; "
                  f"echo 20000 {top} >ipv4/ip_local_port_range"], check=True)
        places = [f"{self.host(client)}:{PORT}" for client in CLIENTS] + [f"127.0.2.{number}:{PORT}" for number in range(1, 21)]
        self.server = self.start([sys.executable, str(HERE / "server.py"), *places], "server")
        self.wait_for_server()
        for client in CLIENTS:
            self.begin(client)

    def wait_for_server(self):
        probe = ["bash", "-c", f"exec 3<>/dev/tcp/127.0.2.20/{PORT}"]
        wait_until("the server", lambda: self.run(probe, stderr=subprocess.DEVNULL).returncode == 0, step=0.1)

    def host(self, client):
        return f"127.0.1.{1 + CLIENTS.index(client)}"

    def inside(self, words, cgroup=None):
        """Returns the command that runs in the namespace, and in a cgroup."""
        within = ["nsenter", f"--net=/proc/{self.holder.pid}/ns/net", "--", *words]
        return within if cgroup is None else ["sh", "-c", 'echo $$ >"$0/cgroup.procs" && exec "$@"', str(cgroup), *within]

    def run(self, words, **options):
        return subprocess.run(self.inside(words), **options)

    def start(self, words, log, cgroup=None, stdin=subprocess.DEVNULL):
        with open(self.room / f"{log}.log", "ab") as output:
            return subprocess.Popen(self.inside(words, cgroup), stdin=stdin, stdout=output, stderr=subprocess.STDOUT, process_group=0)

    def begin(self, client):
        """Starts a client in a new cgroup, and for a proxy the program that makes its load."""
        cgroup, record, address = self.cgroup / client, str(self.room / f"{client}.record"), [self.host(client), str(PORT)]
        cgroup.mkdir()
        python = [sys.executable, str(HERE / "client.py"), record]
        if client in PROXIES:
            text = {"nginx": NGINX, "haproxy": HAPROXY}[client]
            (self.room / f"{client}.conf").write_text(text.format(room=self.room, address=":".join(address)))
            (self.room / f"{client}.sock").unlink(missing_ok=True)
            flag = {"nginx": ["-e", str(self.room / "nginx-error.log"), "-c"], "haproxy": ["-f"]}[client]
            program = self.start([client, *flag, str(self.room / f"{client}.conf")], client, cgroup)
            wait_until(f"{client} listens", (self.room / f"{client}.sock").exists, step=0.01)
            driver = self.start([*python, "unix", str(self.room / f"{client}.sock")], f"{client}-driver", None, subprocess.PIPE)
        else:
            words = {"python": [*python, "inet"], "node": ["node", str(HERE / "client.js"), record],
                     "java": ["java", "-Xmx256m", str(HERE / "Client.java"), record]}[client]
            program = driver = self.start([*words, *address], client, cgroup, subprocess.PIPE)
        with self.lock:
            self.programs[client], self.drivers[client] = program, driver

    def end(self, client):
        """Ends a client and removes its cgroup."""
        with self.lock:
            ended = {self.programs.pop(client), self.drivers.pop(client)}
        cgroup = self.cgroup / client
        for program in ended:
            os.killpg(program.pid, signal.SIGTERM)
        for program in ended:
            try:
                program.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(program.pid, signal.SIGKILL)
                program.wait()
        wait_until(f"{cgroup} is empty", lambda: not (cgroup / "cgroup.procs").read_text(), step=0.01)
        self.cpu[client] += int(re.search(r"usage_usec (\d+)", (cgroup / "cpu.stat").read_text())[1])
        cgroup.rmdir()

    def want(self, client, number):
        with self.lock:
            driver = self.drivers.get(client)
            if driver and driver.poll() is None:
                os.write(driver.stdin.fileno(), b"%d\n" % number)

    def check(self):
        with self.lock:
            for name, program in [*self.programs.items(), *self.drivers.items(), ("server", self.server)]:
                if program.poll() is not None:
                    raise RuntimeError(f"{name} of the {self.name} twin ended: {program.returncode}, see {self.room}")

    def results(self, client):
        """Returns the connects of a client, its failures by kind, and the times of connect() in ms."""
        failures, times, driver = {}, [], {}
        for line in (self.room / f"{client}.record").read_text().splitlines():
            second = json.loads(line)
            times += [us / 1000 for us in second["us"]]
            for kind, number in second["fail"].items():
                driver[kind] = driver.get(kind, 0) + number
        if client == "nginx":
            lines = (self.room / "nginx-access.log").read_text().splitlines()
            times = [float(line.split()[0]) * 1000 for line in lines if line.split()[0] != "-" and line.split()[1] in ("200", "499")]
            for found in re.findall(r"connect\(\) to \S+ failed \((\d+):", (self.room / "nginx-error.log").read_text()):
                kind = "EADDRNOTAVAIL" if found == "99" else f"errno {found}"
                failures[kind] = failures.get(kind, 0) + 1
        elif client == "haproxy":
            lines = (self.room / "haproxy.log").read_text().splitlines()
            times = [float(line.split()[0]) for line in lines if re.fullmatch(r"\d+ \S\S", line)]
            for found in re.findall(r"Connect\(\) failed for backend \S+: ([^.]+)\.", "\n".join(lines)):
                kind = "EADDRNOTAVAIL" if "address" in found or "port" in found else found
                failures[kind] = failures.get(kind, 0) + 1
        else:
            failures = driver
        times.sort()
        return {"connects": len(times), "failures": failures, "load_failures": driver if client in PROXIES else {},
                "median_ms": percentile(times, 0.5), "p99_ms": percentile(times, 0.99), "sum_ms": round(sum(times)),
                "cpu_s": round(self.cpu[client] / 1e6, 1)}

    def stop(self):
        for client in list(self.programs):
            self.end(client)
        for process in (self.server, self.holder):
            process.kill()
            process.wait()


class Guard:
    """The guard, which this harness starts, kills and upgrades."""

    def __init__(self, soak, twin):
        self.soak, self.twin = soak, twin
        self.program, self.socket = soak.room / "fourtuple", soak.room / "guard.sock"
        self.events = soak.room / "events.jsonl"
        self.deaths, self.asked, self.unanswered, self.lock = [], [], [], threading.Lock()
        self.pid = None
        self.install()
        (soak.room / "guard.toml").write_text(POLICY.format(scope=f"/{soak.cgroup.name}"))

    def install(self):
        """Replaces the program as a package does: the old file is deleted, and its process goes on."""
        shutil.copy2(self.soak.flags.fourtuple, f"{self.program}.new")
        os.replace(f"{self.program}.new", self.program)

    def start(self, *flags):
        words = [str(self.program), "guard", "--config", str(self.soak.room / "guard.toml"), "--socket", str(self.socket), *flags]
        with open(self.events, "ab") as output:
            process = subprocess.Popen(self.twin.inside(words), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, process_group=0)
        self.pid = process.pid
        # Guard is a service, whose priority others do not change.
        os.setpriority(os.PRIO_PROCESS, self.pid, self.soak.priority)
        wait_until("guard answers", lambda: self.status() is not None and process.poll() is None, step=0.2)

    def status(self):
        """Returns the answer of `guard status`; None if it has none."""
        answer = subprocess.run([str(self.program), "guard", "status", "--socket", str(self.socket), "--json"], capture_output=True, text=True)
        return json.loads(answer.stdout)["results"] if answer.returncode == 0 else None

    def attached(self):
        try:
            return [name for name in os.listdir(self.twin.cgroup) if bpf_attached(self.twin.cgroup / name)]
        except OSError:
            return []

    def kill(self):
        """Kills guard, and measures the time until nothing is attached."""
        with self.lock:
            fixes = len(self.attached())
            os.kill(self.pid, signal.SIGKILL)
            began = time.monotonic()
            wait_until("nothing is attached", lambda: not self.attached())
            self.deaths.append({"fixes": fixes, "detached_after_ms": round((time.monotonic() - began) * 1000, 1)})
            reap(self.pid)
            time.sleep(random.uniform(0.1, 3))
            self.start()

    def upgrade(self, number):
        with self.lock:
            old = self.pid
            self.install()
            if number % 2:
                self.start("--takeover")
            else:
                os.kill(old, signal.SIGHUP)
                said = self.events.stat().st_size
                successor = lambda: re.search(r"process (\d+) takes over", self.events.read_bytes()[said:].decode())
                wait_until("a successor", successor, step=0.1)
                self.pid = int(successor()[1])
            wait_until("the old guard has ended", lambda: reap(old), step=0.05)

    def ask(self):
        """Asks as a person does."""
        with self.lock:
            began = time.monotonic()
            status = self.status()
            self.asked.append(time.monotonic() - began)
            if status is None:
                self.unanswered.append(time.time())

    def stop(self):
        with self.lock:
            os.kill(self.pid, signal.SIGTERM)
            wait_until("guard has ended", lambda: reap(self.pid), step=0.05)

    def counts(self):
        counts = {}
        for line in self.events.read_text().splitlines():
            event = json.loads(line) if line.startswith("{") else {"event": "other output"}
            counts[event["event"]] = counts.get(event["event"], 0) + 1
        return counts


def reap(pid):
    """Returns whether a process has ended. Successors are children of this process, which is a subreaper."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return not os.path.exists(f"/proc/{pid}")


class Churn:
    """Cgroups with a process each that connects, waits and ends. Some processes have a network namespace of their own."""
    PROGRAM = "exec 3<>/dev/tcp/$0/%d || exit 9; read -t $1 <&3; exit 0" % PORT

    def __init__(self, twins, number):
        self.twins, self.number = twins, number
        self.slots, self.made, self.failed = {}, 0, {twin.name: 0 for twin in twins}

    def step(self):
        for slot in range(self.number):
            processes = self.slots.get(slot)
            if processes and any(process.poll() is None for process in processes):
                continue
            if processes:
                self.remove(slot, processes)
            self.slots[slot] = self.make(slot)

    def make(self, slot):
        self.made += 1
        # One in 40 connects where a client does.
        host = f"127.0.1.{1 + slot % 5}" if slot % 40 == 3 else f"127.0.2.{1 + slot % 20}"
        words = ["bash", "-c", self.PROGRAM, host, f"{random.uniform(0.2, 20):.1f}"]
        if slot % 5 < 2:
            words = ["unshare", "--net", "sleep", words[-1]]
        processes = []
        for twin in self.twins:
            cgroup = twin.cgroup / f"churn-{slot}"
            cgroup.mkdir()
            process = subprocess.Popen(twin.inside(words, cgroup), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            processes.append(process)
        return processes

    def remove(self, slot, processes):
        for twin, process in zip(self.twins, processes):
            self.failed[twin.name] += process.returncode == 9
            (twin.cgroup / f"churn-{slot}").rmdir()

    def stop(self):
        for slot, processes in self.slots.items():
            for process in processes:
                process.kill()
                process.wait()
            self.remove(slot, processes)


class Soak:
    def __init__(self, flags):
        self.flags, self.room = flags, Path(flags.directory).resolve()
        self.room.mkdir(parents=True)
        mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
        self.mount = Path(next(mount[1] for mount in mounts if mount[2] == "cgroup2"))
        self.cgroup = self.mount / f"fourtuple-soak-{os.getpid()}"
        self.cgroup.mkdir()
        self.programs_before = {program["id"] for program in bpftool("prog")}
        self.priority = os.getpriority(os.PRIO_PROCESS, 0)
        os.setpriority(os.PRIO_PROCESS, 0, self.priority + flags.nice)
        self.threads, self.errors, self.restarts = [], [], 0

    def in_background(self, work, *arguments):
        def run():
            try:
                work(*arguments)
            except Exception as error:
                self.errors.append(f"{getattr(work, '__name__', work)}: {error!r}")
        thread = threading.Thread(target=run)
        thread.start()
        self.threads = [known for known in self.threads if known.is_alive()] + [thread]

    def restart(self, twin, client):
        twin.end(client)
        twin.begin(client)

    def schedule(self):
        """Returns the moments of kills, upgrades and restarts, in seconds from the start."""
        seconds = self.flags.minutes * 60
        moments = [(random.uniform(10, seconds - 10), "kill", None) for _ in range(self.flags.kills)]
        moments += [(seconds * (number + 0.7) / self.flags.upgrades, "upgrade", number) for number in range(self.flags.upgrades)]
        number = max(len(CLIENTS), round(self.flags.minutes))
        moments += [(seconds * (index + 0.6) / number, "restart", CLIENTS[index % 5]) for index in range(number)]
        moments += [(second, "ask", None) for second in range(5, int(seconds), 5)]
        return sorted(moments, key=lambda moment: moment[0])

    def run(self):
        twins = [Twin(name, self) for name in TWINS]
        guard, churn = Guard(self, twins[0]), Churn(twins, self.flags.churn)
        guard.start()
        moments, loads = self.schedule(), []
        cycle = min(240, self.flags.minutes * 30)
        began, tick = time.monotonic(), 0
        while (now := time.monotonic() - began) < self.flags.minutes * 60:
            for index, client in enumerate(CLIENTS):
                number = round(self.flags.ports * share_at(now / cycle + index / 10))
                for twin in twins:
                    twin.want(client, number)
            churn.step()
            while moments and moments[0][0] <= now:
                _, kind, what = moments.pop(0)
                if kind == "restart":
                    self.restarts += 1
                    for twin in twins:
                        self.in_background(self.restart, twin, what)
                else:
                    self.in_background({"kill": guard.kill, "upgrade": lambda: guard.upgrade(what), "ask": guard.ask}[kind])
            if tick % 50 == 0:
                loads.append(os.getloadavg()[0])
                for twin in twins:
                    twin.check()
            tick += 1
            time.sleep(max(0, began + tick * TICK - time.monotonic()))
        for thread in self.threads:
            thread.join()
        guard.stop()
        left = self.leftovers(guard)
        churn.stop()
        for twin in twins:
            twin.stop()
        return self.report(twins, guard, churn, left, loads)

    def clean(self):
        """Ends what a run that failed has left."""
        children = Path(f"/proc/self/task/{os.getpid()}/children")
        while processes := children.read_text().split():
            for process in processes:
                os.kill(int(process), signal.SIGKILL)
                os.waitpid(int(process), 0)
        for directory, _, _ in os.walk(self.cgroup, topdown=False):
            os.rmdir(directory)

    def leftovers(self, guard):
        """Returns what guard has left, while its clients still run."""
        def ours():
            held = descriptors_of_programs()
            return [program for program in bpftool("prog") if program["id"] not in held | self.programs_before
                    and str(program.get("name", "")).startswith("fix_")]
        try:
            # The kernel frees programs a moment after their links.
            wait_until("programs are freed", lambda: not ours(), 10, 0.2)
        except TimeoutError:
            pass
        left = [f"program {program['id']} {program['name']}" for program in ours()]
        tree = subprocess.run(["bpftool", "cgroup", "tree", str(self.cgroup)], capture_output=True, text=True)
        left += [f"attached: {line.strip()}" for line in tree.stdout.splitlines()[2:]]
        left += [f"attached to {name}" for name in guard.attached()]
        for process in filter(str.isdigit, os.listdir("/proc")):
            try:
                if os.readlink(f"/proc/{process}/exe").startswith(str(guard.program)):
                    left.append(f"process {process}")
            except OSError:
                pass
        return left + [str(path) for path in self.room.glob("guard.sock*")]

    def report(self, twins, guard, churn, left, loads):
        results = {client: {twin.name: twin.results(client) for twin in twins} for client in CLIENTS}
        harm = list(self.errors)
        for client, of in results.items():
            for group in ("failures", "load_failures"):
                bare, guarded = of["bare"][group], of["guarded"][group]
                harm += [f"{client}: {number} x {kind}, {bare.get(kind, 0)} bare" for kind, number in guarded.items()
                         if number > bare.get(kind, 0) * 1.1]
        if churn.failed["guarded"] > churn.failed["bare"] * 1.1:
            harm.append(f"churn: {churn.failed['guarded']} failed, {churn.failed['bare']} bare")
        harm += [f"left over: {what}" for what in left]
        harm += [f"guard status had no answer at {time.ctime(at)}" for at in guard.unanswered]
        record = {"kernel": platform.release(), "minutes": self.flags.minutes, "ports": self.flags.ports, "load_average": round(sum(loads) / len(loads), 1),
                  "clients": results, "events": guard.counts(), "deaths": guard.deaths, "restarts": self.restarts, "cgroups_made": churn.made,
                  "churn_failed": churn.failed, "status_asked": len(guard.asked), "status_slowest_s": round(max(guard.asked, default=0), 2), "harm": harm}
        (self.room / "soak.json").write_text(json.dumps(record, indent=1) + "\n")
        print_table(record)
        return 1 if harm else 0


def descriptors_of_programs():
    """Returns the programs that a process holds, by descriptors of programs or links: those of others on this host."""
    held = set()
    for path in Path("/proc").glob("[0-9]*/fdinfo/*"):
        try:
            if "bpf" in os.readlink(str(path).replace("fdinfo", "fd")):
                held.update(map(int, re.findall(r"prog_id:\s*(\d+)", path.read_text())))
        except OSError:
            pass
    return held


def bpftool(kind):
    return json.loads(subprocess.run(["bpftool", "--json", kind], capture_output=True, check=True).stdout)


def share_at(cycles):
    at = cycles % 1
    for (before, low), (after, high) in zip(SHAPE, SHAPE[1:]):
        if at <= after:
            return low + (high - low) * (at - before) / (after - before)


def print_table(record):
    print(f"Linux {record['kernel']}, {record['minutes']:g} minutes, {record['ports']} ports, load average {record['load_average']}\n")
    print("| client | twin | connects | failed | median, p99 | sum | processor |\n|---|---|---|---|---|---|---|")
    for client, of in record["clients"].items():
        for twin in TWINS:
            one = of[twin]
            failed = ", ".join(f"{number:,} {kind}" for kind, number in {**one["load_failures"], **one["failures"]}.items()) or "0"
            print(f"| {client} | {twin} | {one['connects']:,} | {failed} | {one['median_ms']:.3g}, {one['p99_ms']:.3g} ms | {one['sum_ms']:,} ms | {one['cpu_s']} s |")
    deaths = record["deaths"]
    after = sorted(death["detached_after_ms"] for death in deaths)
    print(f"\nevents: {record['events']}\nkilled {len(deaths)} times with {sum(death['fixes'] for death in deaths)} fixes attached; "
          f"nothing attached after {percentile(after, 0.5)} ms (median), {max(after, default=0)} ms (max)")
    print(f"{record['restarts']} restarts per twin, {record['cgroups_made']} cgroups made per twin, {record['churn_failed']} of their connects failed; "
          f"status asked {record['status_asked']} times, slowest {record['status_slowest_s']} s")
    print("\n".join(f"HARM {what}" for what in record["harm"]) or "no harm, nothing left")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fourtuple")
    parser.add_argument("directory")
    parser.add_argument("--minutes", type=float, default=60)
    for name, default in (("nice", 0), ("kills", 20), ("upgrades", 2), ("churn", 200), ("ports", 2000)):
        parser.add_argument(f"--{name}", type=int, default=default)
    flags = parser.parse_args()
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if limit < flags.ports * 8:
        parser.error(f"--ports {flags.ports} needs {flags.ports * 8} descriptors (ulimit -Hn: {limit})")
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    # PR_SET_CHILD_SUBREAPER: successors of guard become children of this process.
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    soak = Soak(flags)
    try:
        sys.exit(soak.run())
    finally:
        soak.clean()


if __name__ == "__main__":
    main()
