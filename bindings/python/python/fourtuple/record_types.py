"""Types of the records of all commands. Generated from the JSON schema by generate_types.py: do not edit."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Literal, TypedDict, Union

if sys.version_info >= (3, 11):
    from typing import NotRequired
elif TYPE_CHECKING:
    from typing_extensions import NotRequired

class Host(TypedDict):
    kernel: str
    cpus: int
    virtualization: str
    sysctls: dict[str, str]
    capabilities: dict[str, str]
    name: NotRequired[str]


class PortsSettings(TypedDict):
    low: int
    high: int
    strategies: list[str]
    windows: bool
    fill: float
    protocol: Literal["tcp", "udp"]
    family: Literal[4, 6]
    sources: int
    repeats: int
    seed: int


class TimeWaitSettings(TypedDict):
    low: int
    high: int
    remedies: list[str]
    patience_ns: int


class AcceptSettings(TypedDict):
    workers: int
    clients: int
    connections: int
    families: list[Literal["unix", "tcp4", "tcp6"]]
    policies: list[Literal["exclusive", "plain", "blocking", "rotate", "shared-oneshot", "uring-oneshot", "reuseport", "reuseport-least-busy", "dispatcher", "auto"] | str | Literal["external"]]
    close_every: list[int]
    load: list[Literal["light", "heavy", "sleep", "spin"]]
    service: Literal["sleep", "spin"]
    short_ns: int
    long_ns: int
    long_share: float
    pause_ns: int
    slow_ns: int
    for_ns: int
    repeats: int
    backlog: int
    seed: int
    server: str | None


class LabSettings(TypedDict):
    ports: PortsSettings
    time_wait: TimeWaitSettings
    accept: NotRequired[AcceptSettings]


class Remark(TypedDict):
    id: str
    message: str


class Distribution(TypedDict):
    count: int
    mean: int
    p50: int
    p99: int
    p999: int
    max: int


class ByParity(TypedDict):
    all: Distribution | None
    even: Distribution | None
    odd: Distribution | None


class FillPoint(TypedDict):
    fill: float
    connections: int
    mean_ns: int
    floor_ns: int


class Strategy(TypedDict):
    strategy: str
    repeat: int
    dials: int
    connections: int
    retries: int
    errors: dict[str, int]
    elapsed_ns: int
    rate_per_s: float
    cpu_ns_per_dial: int
    connect_ns: ByParity
    by_fill: list[FillPoint]
    floor_ns: int
    chosen: NotRequired[str]
    scatter: NotRequired[str]


class PortsResults(TypedDict):
    tuples: int
    strategies: list[Strategy]
    advice: list[str]


class TimeWaitPoint(TypedDict):
    at_ns: int
    count: int
    completed: int


class TimeWaitRun(TypedDict):
    remedy: str
    transactions: int
    completed: int
    elapsed_ns: int
    rate_per_s: float
    predicted_stall_ns: int
    stall_ns: int
    cut: bool
    errors: dict[str, int]
    time_wait: list[TimeWaitPoint]
    predicted_stall_at: NotRequired[int]
    stalled_at: NotRequired[int]


class TimeWaitResults(TypedDict):
    ports: int
    time_wait_ns: int
    ceiling_per_s: float
    runs: list[TimeWaitRun]
    advice: list[str]


class WaitNs(TypedDict):
    p50: int
    p99: int
    p999: int
    max: int
    p999_low: int | None
    p999_high: int | None


class Probe(TypedDict):
    requests: int
    slow_per_10k: float
    wait_ns: WaitNs


class AcceptCell(TypedDict):
    policy: Literal["exclusive", "plain", "blocking", "rotate", "shared-oneshot", "uring-oneshot", "reuseport", "reuseport-least-busy", "dispatcher", "auto"] | str | Literal["external"]
    server: str | None
    family: Literal["unix", "tcp4", "tcp6"]
    close_every: int
    load: Literal["light", "heavy", "sleep", "spin"]
    workers: int
    clients: int
    accepts: list[int]
    requests: list[int]
    sockets: list[int]
    busy_ns: list[int]
    jain: float | None
    max_over_mean: float | None
    wait_ns: WaitNs
    slow_per_10k: float
    misplaced_wait_ns: int
    probe: Probe | None
    cpu_ns_per_request: int
    wakeups_per_accept: float | None
    empty_accepts_per_accept: float | None
    operations: int
    errors: dict[str, int]
    repeats: int


class SkippedCell(TypedDict):
    policy: Literal["exclusive", "plain", "blocking", "rotate", "shared-oneshot", "uring-oneshot", "reuseport", "reuseport-least-busy", "dispatcher", "auto"] | str | Literal["external"]
    family: Literal["unix", "tcp4", "tcp6"]
    close_every: int
    why: str


class Span(TypedDict):
    from_ns: int
    to_ns: int
    waited_ns: int


class Waiter(TypedDict):
    worker: int
    sent_ns: int
    begun_ns: int
    ended_ns: int
    idle_worker: int


class Timeline(TypedDict):
    policy: Literal["exclusive", "plain", "blocking", "rotate", "shared-oneshot", "uring-oneshot", "reuseport", "reuseport-least-busy", "dispatcher", "auto"] | str | Literal["external"]
    family: Literal["unix", "tcp4", "tcp6"]
    close_every: int
    workers: list[list[Span]]
    from_ns: int
    to_ns: int
    waiting: Waiter


class BreakEven(TypedDict):
    fresh_connection_ns: int
    misplaced_wait_ns: int
    requests: int
    closes: bool


class AcceptResults(TypedDict):
    cells: list[AcceptCell]
    skipped: list[SkippedCell]
    timeline: Timeline | None
    break_even: BreakEven | None
    advice: list[str]


class LabResults(TypedDict):
    ports: PortsResults
    time_wait: TimeWaitResults
    accept: NotRequired[AcceptResults]


class LabRecord(TypedDict):
    schema: Literal["fourtuple/1"]
    command: Literal["lab"]
    started: str
    host: Host
    settings: LabSettings
    validity: list[Remark]
    results: LabResults


class LabPortsRecord(TypedDict):
    schema: Literal["fourtuple/1"]
    command: Literal["lab ports"]
    started: str
    host: Host
    settings: PortsSettings
    validity: list[Remark]
    results: PortsResults


class LabTimeWaitRecord(TypedDict):
    schema: Literal["fourtuple/1"]
    command: Literal["lab time-wait"]
    started: str
    host: Host
    settings: TimeWaitSettings
    validity: list[Remark]
    results: TimeWaitResults


class LabAcceptRecord(TypedDict):
    schema: Literal["fourtuple/1"]
    command: Literal["lab accept"]
    started: str
    host: Host
    settings: AcceptSettings
    validity: list[Remark]
    results: AcceptResults


class LabKeepaliveRecord(TypedDict):
    schema: Literal["fourtuple/1"]
    command: Literal["lab keepalive"]
    started: str
    host: Host
    settings: AcceptSettings
    validity: list[Remark]
    results: AcceptResults


class LabLocksSettings(TypedDict):
    changes: list[Literal["reuseport", "sources", "full-range"]]
    workers: int
    clients: int
    queries: int
    sources: int
    repeats: int
    traced: int
    closer: Literal["client"]
    narrow: float
    seed: int


LocksClass = TypedDict("LocksClass", {
    "class": 'str',
    "waits_per_query": 'float',
    "wait_ns_per_query": 'float',
})


class LocksSide(TypedDict):
    policy: Literal["exclusive", "plain", "blocking", "rotate", "shared-oneshot", "uring-oneshot", "reuseport", "reuseport-least-busy", "dispatcher", "auto"] | str
    sources: int
    strategy: str
    low: int
    high: int
    queries: int
    queries_per_s: float
    queries_per_s_low: float
    queries_per_s_high: float
    cpu_ns_per_query: float
    cpu_ns_per_query_low: float
    cpu_ns_per_query_high: float
    waits_per_query: float | None
    wait_ns_per_query: float | None
    classes: list[LocksClass]
    errors: dict[str, int]


class LocksRatio(TypedDict):
    value: float
    low: float | None
    high: float | None


class LocksPair(TypedDict):
    change: Literal["reuseport", "sources", "full-range"]
    before: LocksSide
    after: LocksSide
    pairs: int
    ratio: LocksRatio
    verdict: str
    cpu_ratio: LocksRatio
    cpu_verdict: str
    advice: str


class LabLocksResults(TypedDict):
    pairs: list[LocksPair]
    untraced: str | None
    blind_spots: list[str]
    advice: list[str]


class LabLocksRecord(TypedDict):
    schema: Literal["fourtuple/1"]
    command: Literal["lab locks"]
    started: str
    host: Host
    settings: LabLocksSettings
    validity: list[Remark]
    results: LabLocksResults


class PlanesSettings(TypedDict):
    every_combination: bool
    plane: list[Literal["one-by-one", "batched", "offload", "uring"]]
    planes: list[int]
    bytes: list[int]
    spread: list[Literal["hash", "random", "flow", "cpu"]]
    flows: list[int]
    work_ns: list[int]
    packets: int
    repeats: int
    over: Literal["veth", "loopback"]
    seed: int


class PlanesRatio(TypedDict):
    ratio: float
    low: float
    high: float


class PlanesCell(TypedDict):
    plane: Literal["one-by-one", "batched", "offload", "uring"]
    planes: int
    spread: Literal["hash", "random", "flow", "cpu"]
    flows: int
    inner_flows: int
    packet_bytes: int
    mtu: int
    work_ns: int
    repeats: int
    packets: int
    lost: int
    dropped: dict[str, int]
    reordered: int
    share: list[float]
    cpu_ns_per_packet: int
    cpu_ns_low: int | None
    cpu_ns_high: int | None
    pps: float
    pps_low: float | None
    pps_high: float | None
    capacity_pps: float
    generator_waited: float
    limited_by: Literal["generator", "planes"]
    generator_cpu_ns_per_packet: int
    sink_cpu_ns_per_packet: int
    cpu_to_one_by_one: PlanesRatio | None
    capacity_to_one_plane: PlanesRatio | None
    pps_to_one_plane: PlanesRatio | None


class PlanesSkipped(TypedDict):
    plane: Literal["one-by-one", "batched", "offload", "uring"]
    why: str


class PlanesResults(TypedDict):
    cells: list[PlanesCell]
    skipped: list[PlanesSkipped]
    planes_help_above_ns: int | None
    advice: list[str]


class LabPlanesRecord(TypedDict):
    schema: Literal["fourtuple/1"]
    command: Literal["lab planes"]
    started: str
    host: Host
    settings: PlanesSettings
    validity: list[Remark]
    results: PlanesResults


class PlanSettings(TypedDict):
    low: int
    high: int
    reserved: int
    sources: int
    destinations: int
    hold_ns: int
    closer: Literal["us", "them"]
    time_wait_ns: int
    kernel: Literal["parity", "linear"]
    strategy: str
    windows: bool
    costs: Literal["calibrated", "reference"]
    arrival_per_s: NotRequired[float]


class PlanPoint(TypedDict):
    fill: float
    probes: float
    mean_ns: int


class PlanOther(TypedDict):
    strategy: str
    cliff_connections: int | None
    cliff_after_ns: int | None
    sources_needed: int
    last_mean_ns: int | None


class PlanMoment(TypedDict):
    at_ns: int
    tuples: int


class PlanResults(TypedDict):
    capacity: int
    cliff_connections: int | None
    steady_tuples: int | None
    cliff_after_ns: int | None
    exhausted_after_ns: int | None
    sources_needed: int
    failed_dials: int
    by_fill: list[PlanPoint]
    others: list[PlanOther]
    over_time: list[PlanMoment]
    simulated: int
    advice: list[str]


class PlanRecord(TypedDict):
    schema: Literal["fourtuple/1"]
    command: Literal["plan"]
    started: str
    host: Host
    settings: PlanSettings
    validity: list[Remark]
    results: PlanResults


class CompareSettings(TypedDict):
    a: str
    b: str
    metric: Literal["rate", "mean", "p50", "p99", "p999", "cpu"]
    for_ns: int | None
    narrow: float
    trials: int | None
    warmup: int
    server_a: str | None
    server_b: str | None
    server_wait_ns: int | None
    pinned: bool
    fresh_namespace: bool | None
    seed: int


class CompareResults(TypedDict):
    ratio: float
    low: float | None
    high: float | None
    verdict: str
    trials: int
    pairs: int
    client_saturated: int
    samples_a: list[float]
    samples_b: list[float]


class CompareRecord(TypedDict):
    schema: Literal["fourtuple/1"]
    command: Literal["compare"]
    started: str
    host: Host
    settings: CompareSettings
    validity: list[Remark]
    results: CompareResults


class LoadRamp(TypedDict):
    from_per_s: float
    to_per_s: float
    steps: int


class LoadRequests(TypedDict):
    file: str
    count: int
    order: Literal["turn", "random"]


class LoadTlsSettings(TypedDict):
    name: str | None
    certificate: str | None
    key: str | None
    full_handshakes: bool
    protocols: list[str]


class LoadSettings(TypedDict):
    target: str
    address: str
    workload: Literal["connect", "crr", "http", "udp", "hold"]
    arrival: Literal["closed", "even", "poisson"]
    rate_per_s: float | None
    connections: int
    pause_ns: int
    close_every: int
    hold: int
    operations: int | None
    for_ns: int | None
    timeout_ns: int
    threshold_ns: int | None
    engine: Literal["auto", "uring", "epoll"]
    threads: int
    pinned: bool
    strategy: str
    sources: str | None
    close: Literal["client", "rst", "server"]
    request_bytes: int
    response_bytes: int
    method: str
    separate_ack: bool
    anyway: bool
    seed: int
    all_addresses: NotRequired[bool]
    expect: NotRequired[list[str]]
    ramp: NotRequired[LoadRamp | None]
    requests: NotRequired[LoadRequests | None]
    resolve: NotRequired[str | None]
    streams: NotRequired[int | None]
    tls: NotRequired[LoadTlsSettings | None]
    warm_up_ns: NotRequired[int]


class Quantiles(TypedDict):
    samples: int
    mean: int
    p50: int
    p99: int
    p999: int
    max: int
    p75: NotRequired[int | None]
    p90: NotRequired[int | None]
    p95: NotRequired[int | None]


class Latency(TypedDict):
    search: Quantiles
    handshake: Quantiles
    first_byte: Quantiles
    total: Quantiles
    tls: NotRequired[Quantiles]


class Slow(TypedDict):
    at_ns: int
    total_ns: int
    longest: Literal["late", "connect", "response"]
    request: int


class Second(TypedDict):
    at_ns: int
    operations: int
    connections: int
    errors: int
    p50_ns: int
    p99_ns: int
    max_ns: int
    ports_left: int | None


class Quantile(TypedDict):
    share: float
    ns: int


class LoadPorts(TypedDict):
    budget: int
    taken_before: int
    needed: int | None
    used: int
    kept_ns: int
    predicted_stall_ns: int | None
    stalled_ns: int | None
    stall_length_ns: int


class Held(TypedDict):
    opened: int
    lost: int
    ramp_ns: int


class LoadAddress(TypedDict):
    address: str
    connections: int


class LoadExpectation(TypedDict):
    expect: str
    unit: Literal["ns", "per_s", "share", "count"]
    limit: float
    measured: float | None
    met: bool


class LoadHost(TypedDict):
    name: str
    labels: dict[str, str]
    kernel: str
    cpus: int
    address: str
    clock_offset_ns: int
    clock_bound_ns: int
    start_error_ns: int | None
    lost_at_ns: int | None
    intervals: int
    missing: int
    operations: int
    connections: int
    errors: dict[str, int]
    rate_per_s: float
    offered_per_s: float | None
    client_cpu_ns_per_operation: int | None
    total_ns: Quantiles | None
    seconds: list[Second]


class LoadHttp2(TypedDict):
    most_streams: int
    server_limit: int | None
    goaways: int
    refused_streams: int
    window_waits: int
    window_wait_ns: int


class LoadRequestCount(TypedDict):
    method: str
    path: str
    responses: int


class LoadStatus(TypedDict):
    code: int
    count: int
    location: NotRequired[str]


class LoadStep(TypedDict):
    offered_per_s: float
    rate_per_s: float
    operations: int
    connections: int
    errors: int
    warm_up_operations: int
    p50_ns: int
    p99_ns: int
    max_ns: int
    client_cpu_ns_per_operation: int
    not_reached: str | None


class LoadTls(TypedDict):
    version: str
    cipher: str
    protocol: str | None
    resumed: bool
    connections: int


class LoadWarmUp(TypedDict):
    for_ns: int
    operations: int
    connections: int
    errors: int


class LoadResults(TypedDict):
    operations: int
    connections: int
    errors: dict[str, int]
    elapsed_ns: int
    rate_per_s: float
    offered_per_s: float
    client_cpu_ns_per_operation: int
    syscalls_per_connection: float
    engine: Literal["uring", "epoll", "h2"]
    engine_reason: str | None
    close: Literal["client", "rst", "server"]
    strategy: str | None
    latency_ns: Latency
    late_ns: Quantiles
    slow: list[Slow]
    slow_count: int
    seconds: list[Second]
    distribution: list[Quantile]
    ports: LoadPorts | None
    hold: Held | None
    advice: list[str]
    addresses: NotRequired[list[LoadAddress]]
    error_details: NotRequired[dict[str, str]]
    expectations: NotRequired[list[LoadExpectation]]
    hosts: NotRequired[list[LoadHost]]
    http2: NotRequired[LoadHttp2]
    received_bytes: NotRequired[int | None]
    requests: NotRequired[list[LoadRequestCount]]
    retried: NotRequired[int]
    sent_bytes: NotRequired[int | None]
    status_classes: NotRequired[dict[str, int]]
    statuses: NotRequired[list[LoadStatus]]
    steps: NotRequired[list[LoadStep]]
    tls: NotRequired[list[LoadTls]]
    warm_up: NotRequired[LoadWarmUp | None]


class LoadRecord(TypedDict):
    schema: Literal["fourtuple/1"]
    command: Literal["load"]
    started: str
    host: Host
    settings: LoadSettings
    validity: list[Remark]
    results: LoadResults


class ServeSettings(TypedDict):
    listen: str
    protocol: Literal["crr", "http", "udp", "sink"]
    workers: int
    close: Literal["client", "server", "rst"]
    service: str
    spin: bool
    backlog: int
    defer_accept: bool
    pin: bool
    for_ns: int | None
    seed: int
    close_every: NotRequired[int]
    idle_ns: NotRequired[int]
    policy: NotRequired[Literal["exclusive", "plain", "blocking", "rotate", "shared-oneshot", "uring-oneshot", "reuseport", "reuseport-least-busy", "dispatcher", "auto"] | str]
    request_bytes: NotRequired[int]
    response_bytes: NotRequired[int]
    stall_at_ns: NotRequired[int]
    stall_length_ns: NotRequired[int]


class ServeWorker(TypedDict):
    accepted: int
    requests: int
    received_bytes: int
    sent_bytes: int
    errors: dict[str, int]


class ServeResults(TypedDict):
    listen: str
    protocol: Literal["crr", "http", "udp", "sink"]
    policy: Literal["exclusive", "plain", "blocking", "rotate", "shared-oneshot", "uring-oneshot", "reuseport", "reuseport-least-busy", "dispatcher", "auto"] | str
    elapsed_ns: int
    requests_per_s: float
    workers: list[ServeWorker]
    jain: float | None
    max_over_mean: float | None


class ServeRecord(TypedDict):
    schema: Literal["fourtuple/1"]
    command: Literal["serve"]
    started: str
    host: Host
    settings: ServeSettings
    validity: list[Remark]
    results: ServeResults


class ForwardBfdTimers(TypedDict):
    interval_ns: int
    receive_interval_ns: int
    multiplier: int


class ForwardLink(TypedDict):
    listen: str
    to: str | None
    routes: list[str]
    key: str | None
    spread: str
    replies: bool
    idle_ns: int
    clients: int
    bfd: str | None
    bfd_in_band: str | None
    bfd_timers: NotRequired[ForwardBfdTimers]


class ForwardSettings(TypedDict):
    links: list[ForwardLink]
    planes: int
    plane: Literal["one-by-one", "batched", "offload", "uring"]
    pin: bool
    for_ns: int | None


class ForwardPlane(TypedDict):
    received: int
    received_bytes: int
    sent: int
    sent_bytes: int
    returned: int
    dropped: dict[str, int]
    clients: int
    unsegmented: int
    cpu_ns: int
    share: float
    dropped_replies: NotRequired[dict[str, int]]
    evicted: NotRequired[int]
    failed_later: NotRequired[int]
    failed_receives: NotRequired[int]
    unanswered: NotRequired[int]


class ForwardBfd(TypedDict):
    peer: str
    reception: Literal["port", "filter", "planes"]
    state: Literal["admin-down", "down", "init", "up"]
    diagnostic: str
    ups: int
    downs: int
    sent: int
    received: int
    discarded: dict[str, int]


class ForwardResults(TypedDict):
    elapsed_ns: int
    listen: list[str]
    planes: list[ForwardPlane]
    jain: float | None
    bfd: list[ForwardBfd]
    advice: list[str]
    client_limit: NotRequired[int | None]


class ForwardRecord(TypedDict):
    schema: Literal["fourtuple/1"]
    command: Literal["forward"]
    started: str
    host: Host
    settings: ForwardSettings
    validity: list[Remark]
    results: ForwardResults


class FixPortsSettings(TypedDict):
    cgroup: str
    source: str | None
    to: str | None
    past: float
    for_ns: int | None
    dry_run: bool


class FixNamespace(TypedDict):
    cookie: int
    low: int
    high: int
    usable: int


class FixPortsTuple(TypedDict):
    namespace: int
    source: str
    destination: str
    connects: int
    drawn: int
    fallbacks: int
    share: float


class FixPortsResults(TypedDict):
    elapsed_ns: int
    connects: int
    connects_per_s: float
    left: dict[str, int]
    drawn: int
    spread: int
    fallbacks: int
    would_draw: int
    probes: int
    probes_per_draw: float | None
    refused: int
    in_order: int
    time_wait_used: int
    hook_ns: int
    hook_ns_per_draw: int | None
    avoided_probes: int
    probe_ns: float | None
    floor_ns: int | None
    saved_ns: int | None
    namespaces: list[FixNamespace]
    tuples: list[FixPortsTuple]
    tuples_left_out: int


class FixPortsRecord(TypedDict):
    schema: Literal["fourtuple/1"]
    command: Literal["fix ports"]
    started: str
    host: Host
    settings: FixPortsSettings
    validity: list[Remark]
    results: FixPortsResults


class FixAcceptSettings(TypedDict):
    listen: str | None
    pid: int | None
    select: str
    control: str | None
    for_ns: int | None
    dry_run: bool


class FixAcceptListener(TypedDict):
    transport: Literal["tcp", "udp", "unix"]
    address: str
    cookie: int
    process: int
    command: str
    choices: int
    connections: int
    share: float | None
    open: int | None
    queue: int | None
    moves: NotRequired[int]


class FixAcceptResults(TypedDict):
    elapsed_ns: int
    groups: int
    choices: int
    choices_per_s: float
    connections: int
    lapsed: int
    strays: int
    joined: int
    closed: int
    missed: int
    listeners: list[FixAcceptListener]
    listeners_left_out: int
    moves: NotRequired[int]


class FixAcceptRecord(TypedDict):
    schema: Literal["fourtuple/1"]
    command: Literal["fix accept"]
    started: str
    host: Host
    settings: FixAcceptSettings
    validity: list[Remark]
    results: FixAcceptResults


class GuardSettings(TypedDict):
    socket: str


class GuardFix(TypedDict):
    action: Literal["fix-ports", "fix-accept", "notify"]
    target: str
    to: str | None
    namespace: int
    pid: int | None
    source: str | None
    since_ns: int
    reason: str
    effect: Literal["pending", "helps", "none"]
    connects: int
    drawn: int
    fallbacks: int
    saved_ns: int | None


class GuardTotals(TypedDict):
    attached: int
    released: int
    refused: int
    notified: int
    connects: int
    drawn: int
    fallbacks: int
    saved_ns: int


class GuardEvent(TypedDict):
    at: str
    event: Literal["start", "attach", "effect", "release", "refusal", "would", "notify", "pause", "resume", "takeover", "stop"]
    action: Literal["fix-ports", "fix-accept", "notify"] | None
    target: str
    message: str


class GuardResults(TypedDict):
    state: Literal["active", "observing", "paused"]
    uptime_ns: int
    policy: str | None
    paused_for_ns: int | None
    every_ns: int
    namespaces: int
    fixes: list[GuardFix]
    totals: GuardTotals
    events: list[GuardEvent]


class GuardStatusRecord(TypedDict):
    schema: Literal["fourtuple/1"]
    command: Literal["guard status"]
    started: str
    host: Host
    settings: GuardSettings
    validity: list[Remark]
    results: GuardResults


class RunSettings(TypedDict):
    command: list[str]
    via: str | None


class RunResults(TypedDict):
    way: str
    passed_over: dict[str, str]
    elapsed_ns: int
    exit_code: int | None
    signal: int | None
    connects: int
    changed: int
    left: dict[str, int]
    bound: int | None
    named: int | None
    connect_ns: int | None
    even: int | None
    odd: int | None
    unavailable: int | None
    avoided: int | None
    calls: int | None
    held_ns: int | None
    ports: FixPortsResults | None


class RunRecord(TypedDict):
    schema: Literal["fourtuple/1"]
    command: Literal["run"]
    started: str
    host: Host
    settings: RunSettings
    validity: list[Remark]
    results: RunResults


class FleetSettings(TypedDict):
    labels: list[str]
    command: list[str]


class FleetHost(TypedDict):
    name: str
    labels: dict[str, str]
    kernel: str
    cpus: int
    record: Record | None
    failed: str | None


class FleetResults(TypedDict):
    hosts: list[FleetHost]
    differences: list[str]


class FleetRecord(TypedDict):
    schema: Literal["fourtuple/1"]
    command: Literal["fleet doctor", "fleet lab ports", "fleet trace connect", "fleet plan", "fleet serve"]
    started: str
    host: Host
    settings: FleetSettings
    validity: list[Remark]
    results: FleetResults


class DoctorSettings(TypedDict):
    pid: int | None
    netns: str | None
    container: str | None
    to: str | None
    for_ns: int
    thresholds: dict[str, float]


class DoctorAdvice(TypedDict):
    action: str
    is_command: bool
    effect: str
    condition: str | None
    proof: Literal["none", "calculation", "test"]
    needs_root: bool
    until: str | None
    undo: str | None
    lasting: str | None
    remains: NotRequired[Literal["critical", "warning", "notice"] | None]


class DoctorFinding(TypedDict):
    id: str
    severity: Literal["critical", "warning", "notice"]
    subject: str
    verdict: str
    evidence: list[str]
    now: list[DoctorAdvice]
    proper: list[DoctorAdvice]
    same_cause_as: NotRequired[int | None]


class DoctorUnchecked(TypedDict):
    id: str
    title: str
    reason: str


class DoctorConfiguredSysctl(TypedDict):
    file: str
    line: int
    name: str
    value: str


class DoctorSnapshotConfiguredSeen(TypedDict):
    seen: list[DoctorConfiguredSysctl]


class DoctorHidden(TypedDict):
    hidden: str


class DoctorEphemeralPorts(TypedDict):
    low: int
    high: int
    reserved: list[list[int]]


class DoctorSnapshotPortsSeen(TypedDict):
    seen: DoctorEphemeralPorts


class DoctorPortSearch(TypedDict):
    default: str
    option: str


class DoctorSnapshotSearchSeen(TypedDict):
    seen: DoctorPortSearch


class IdleTimes(TypedDict):
    median_ns: int
    longest_ns: int


class RunningFix(TypedDict):
    pid: int
    source: str | None
    guard: NotRequired[bool]


class DoctorOwner(TypedDict):
    pid: int
    name: str
    sockets: int


class DoctorTuple(TypedDict):
    source: str
    destination: str
    in_use: int
    low_parity: int
    states: dict[str, int]
    closes_per_s: float
    closed_last_s: int
    growth_per_s: float
    time_wait_plain: int | None
    idle: IdleTimes | None
    fix: RunningFix | None
    owners: list[DoctorOwner]
    closing_ns: NotRequired[int]


class DoctorSource(TypedDict):
    address: str
    in_use: int
    low_parity: int
    destinations: int
    owners: list[DoctorOwner]


class DoctorHeldPort(TypedDict):
    port: int
    address: str
    kind: str
    owner: DoctorOwner | None


class DoctorService(TypedDict):
    port: int
    states: dict[str, int]
    closes_per_s: float
    workers: list[DoctorOwner]


class DoctorCloseWait(TypedDict):
    owner: DoctorOwner
    remote: str
    oldest_ns: int
    settled: int
    old: int


class DoctorUnixCloseWait(TypedDict):
    owner: DoctorOwner
    path: str
    settled: int
    settled_ns: int


class SelfConnected(TypedDict):
    address: str
    owner: DoctorOwner | None


class Unanswered(TypedDict):
    destination: str
    established: bool
    sockets: int
    retransmits: int
    owner: DoctorOwner | None
    none_acknowledged: NotRequired[int]
    route: NotRequired[str | None]
    service: NotRequired[int | None]
    unsent: NotRequired[int]


class Unread(TypedDict):
    port: int
    owner: DoctorOwner
    oldest_ns: int
    sent_ns: int
    short: NotRequired[int]


class DoctorConnections(TypedDict):
    age_ns: int
    processes_by: str
    processes_hidden: int
    states: dict[str, int]
    tuples: list[DoctorTuple]
    tuples_left_out: int
    tuples_left_out_states: dict[str, int]
    sources: list[DoctorSource]
    held: list[DoctorHeldPort]
    held_udp_hidden: str | None
    held_left_out: int
    held_tcp: int
    held_tcp_low_parity: int
    held_bound: int
    services: list[DoctorService]
    services_left_out: int
    close_wait: list[DoctorCloseWait]
    unix_close_wait: list[DoctorUnixCloseWait]
    self_connected: list[SelfConnected]
    held_udp: NotRequired[int]
    left: NotRequired[list[DoctorService]]
    udp_holder: NotRequired[DoctorOwner | None]
    unanswered: NotRequired[list[Unanswered]]
    unread: NotRequired[list[Unread]]


class DoctorSnapshotConnectionsSeen(TypedDict):
    seen: DoctorConnections


class DoctorCounter(TypedDict):
    total: int
    during: int


class DoctorListener(TypedDict):
    address: str
    interface: int
    cookie: int
    waiting: int
    waiting_before: int
    standing: int
    given_up: int
    waited_ns: int
    backlog: int
    handshakes: int
    drops: DoctorCounter | None
    owners: list[DoctorOwner]
    fix: NotRequired[int | None]
    handshakes_resent: NotRequired[int]
    ipv6_only: NotRequired[bool]
    mptcp: NotRequired[bool]
    resent_to: NotRequired[str | None]


class DoctorSnapshotListenersSeen(TypedDict):
    seen: list[DoctorListener]


class DoctorUnixListener(TypedDict):
    path: str
    cookie: int
    waiting: int
    waiting_before: int
    standing: int
    given_up: int
    backlog: int
    owners: list[DoctorOwner]
    workers: list[DoctorOwner]
    clients: list[DoctorOwner]
    fix: NotRequired[int | None]


class DoctorSnapshotUnixListenersSeen(TypedDict):
    seen: list[DoctorUnixListener]


class DoctorUdpSocketView(TypedDict):
    local: str
    remote: str | None
    interface: int
    cookie: int
    queued_bytes: int
    limit_bytes: int | None
    drops: DoctorCounter | None
    user: int
    owners: list[DoctorOwner]


class UnansweredQueries(TypedDict):
    server: str
    sockets: int
    owner: DoctorOwner | None


class DoctorUdpSockets(TypedDict):
    total: int
    sockets: list[DoctorUdpSocketView]
    left_out: int
    queries: NotRequired[list[UnansweredQueries]]


class DoctorSnapshotUdpSeen(TypedDict):
    seen: DoctorUdpSockets


class DoctorProcess(TypedDict):
    pid: int
    name: str
    descriptors: int
    descriptor_limit: int | None
    descriptor_ceiling: int | None
    parent: int
    parent_name: str | None
    executable: str | None
    cgroup: str | None
    group: int
    state: str
    started_ns: int
    cpu_ns: int | None
    command_line: NotRequired[str | None]
    waits_in: NotRequired[str | None]


class DoctorSnapshotProcessesSeen(TypedDict):
    seen: list[DoctorProcess]


class DoctorSnapshotCountersSeen(TypedDict):
    seen: dict[str, DoctorCounter]


class DoctorTcpMemory(TypedDict):
    orphans: int
    time_wait: int
    pages: int
    limits_pages: list[int]


class DoctorSnapshotMemorySeen(TypedDict):
    seen: DoctorTcpMemory


class Translated(TypedDict):
    source: str
    destination: str
    protocol: str
    ports: int
    low: int
    high: int
    closed: NotRequired[int]


class DoctorConntrack(TypedDict):
    count: int
    limit: int
    counters: dict[str, DoctorCounter]
    translated: list[Translated] | None


class DoctorSnapshotConntrackSeen(TypedDict):
    seen: DoctorConntrack


class DoctorLocalAddress(TypedDict):
    address: str
    prefix: int
    device: str | None
    tentative: NotRequired[bool]


class DoctorSnapshotAddressesSeen(TypedDict):
    seen: list[DoctorLocalAddress]


class DoctorSnapshotLostSourcesSeen(TypedDict):
    seen: list[str]


class DoctorTracedConnects(TypedDict):
    owner: DoctorOwner
    processes: int
    destination: str
    searches: int
    search_mean_ns: int
    search_p99_ns: int
    given_port: int
    established: NotRequired[int]
    failed: NotRequired[int]


class DoctorTraced(TypedDict):
    connects: list[DoctorTracedConnects]
    search_p99_ns: int | None
    searches: int
    search_ns: int
    established: NotRequired[int]


class DoctorSnapshotTracedSeen(TypedDict):
    seen: DoctorTraced


class TurnedAway(TypedDict):
    listener: int
    accepts: int
    closed: int


class DoctorTracedAccepts(TypedDict):
    accepts: int
    wait_p99_ns: int | None
    turned_away: NotRequired[list[TurnedAway]]


class DoctorSnapshotAcceptsSeen(TypedDict):
    seen: DoctorTracedAccepts


class DoctorLockWaits(TypedDict):
    waits: int
    waited_ns: int


class DoctorTracedLocks(TypedDict):
    interval_ns: int
    classes: dict[str, DoctorLockWaits]


class DoctorSnapshotLocksSeen(TypedDict):
    seen: DoctorTracedLocks


class PortHolder(TypedDict):
    owner: DoctorOwner | None
    local: str
    remote: str | None
    state: str


class FailedCall(TypedDict):
    call: Literal["socket", "bind", "listen", "connect", "accept", "send", "recv"]
    errno: str
    protocol: Literal["tcp", "udp", "unix", "other"]
    owner: DoctorOwner
    processes: int
    address: str | None
    before_search: bool
    failed: int
    addresses: NotRequired[int]
    causes: NotRequired[list[str]]
    holder: NotRequired[PortHolder | None]
    namespace: NotRequired[int]
    range: NotRequired[list[int] | None]
    route: NotRequired[str | None]
    running_ns: NotRequired[int | None]


class FailedElsewhere(TypedDict):
    pid: int
    calls: list[FailedCall]


class Failures(TypedDict):
    calls: list[FailedCall]
    left_out: int
    elsewhere: NotRequired[list[FailedElsewhere]]
    processes_32_bit: NotRequired[list[DoctorOwner]]


class DoctorSnapshotFailuresSeen(TypedDict):
    seen: Failures


class DoctorSnapshot(TypedDict):
    interval_ns: int
    processors: int
    sysctls: dict[str, str]
    configured: DoctorSnapshotConfiguredSeen | DoctorHidden
    ports: DoctorSnapshotPortsSeen | DoctorHidden
    search: DoctorSnapshotSearchSeen | DoctorHidden
    connections: DoctorSnapshotConnectionsSeen | DoctorHidden
    listeners: DoctorSnapshotListenersSeen | DoctorHidden
    unix_listeners: DoctorSnapshotUnixListenersSeen | DoctorHidden
    udp: DoctorSnapshotUdpSeen | DoctorHidden
    processes: DoctorSnapshotProcessesSeen | DoctorHidden
    counters: DoctorSnapshotCountersSeen | DoctorHidden
    memory: DoctorSnapshotMemorySeen | DoctorHidden
    conntrack: DoctorSnapshotConntrackSeen | DoctorHidden
    addresses: DoctorSnapshotAddressesSeen | DoctorHidden
    lost_sources: DoctorSnapshotLostSourcesSeen | DoctorHidden
    traced: DoctorSnapshotTracedSeen | DoctorHidden
    accepts: DoctorSnapshotAcceptsSeen | DoctorHidden
    locks: DoctorSnapshotLocksSeen | DoctorHidden
    failures: DoctorSnapshotFailuresSeen | DoctorHidden
    other_namespaces: NotRequired[int]


class DoctorMoment(TypedDict):
    at_ns: int
    in_use: list[int]
    time_wait: int
    queued: int


class DoctorHistory(TypedDict):
    tuples: list[str]
    moments: list[DoctorMoment]


class DoctorResults(TypedDict):
    findings: list[DoctorFinding]
    checked: list[str]
    unchecked: list[DoctorUnchecked]
    snapshot: DoctorSnapshot
    history: DoctorHistory | None


class DoctorRecord(TypedDict):
    schema: Literal["fourtuple/1"]
    command: Literal["doctor"]
    started: str
    host: Host
    settings: DoctorSettings
    validity: list[Remark]
    results: DoctorResults


class TraceConnectSettings(TypedDict):
    process: int | None
    name: str | None
    destination: str | None
    port: int | None
    cgroup: str | None
    for_ns: int | None
    seed: int
    tier: Literal["auto", "tp_btf", "fexit"]
    netns: NotRequired[str | None]
    protocol: NotRequired[Literal["tcp", "udp"]]


class TraceStep(TypedDict):
    from_ns: int
    even: int
    odd: int


class TraceHeat(TypedDict):
    column_ns: int
    from_ns: list[int]
    columns: list[list[int]]


class TraceFlame(TypedDict):
    samples: int
    samples_per_s: int
    in_connect: float
    in_search: float
    lost: int


class TraceTuple(TypedDict):
    process: int
    name: str
    destination: str
    searches: int
    even: int
    odd: int
    mean_ns: int
    p99_ns: int
    even_p50_ns: int | None
    odd_p50_ns: int | None
    failed: int
    no_port: int
    given_port: int
    established: int
    retries: int
    syn_retries: int
    closed_first: int
    closed_by_peer: int
    in_use: int | None
    range: int | None
    fill: float | None
    namespace: NotRequired[int]
    processes: NotRequired[int]


class TraceSample(TypedDict):
    at_ns: int
    search_ns: int
    source_port: int | None
    tuple: int | None


class TraceConnectResultsCallsSeen(TypedDict):
    seen: Failures


class TraceSymptom(TypedDict):
    sentence: str
    rules: list[str]


class TraceConnectResultsSymptomsSeen(TypedDict):
    seen: list[TraceSymptom]


class TraceConnectResults(TypedDict):
    tier: Literal["tp_btf", "fexit", "cgroup+tp_btf"]
    tier_reason: str | None
    elapsed_ns: int
    searches: int
    searches_per_s: float
    failed: dict[str, int]
    given_port: int
    established: int
    untimed: int
    lost: int
    switched: int
    search_ns: ByParity
    failed_search_ns: Distribution | None
    handshake_ns: Distribution | None
    histogram: list[TraceStep]
    heat: TraceHeat
    flame: TraceFlame | None
    tuples: list[TraceTuple]
    samples: list[TraceSample]
    calls: NotRequired[TraceConnectResultsCallsSeen | DoctorHidden]
    notes: NotRequired[list[str]]
    symptoms: NotRequired[TraceConnectResultsSymptomsSeen | DoctorHidden]


class TraceConnectRecord(TypedDict):
    schema: Literal["fourtuple/1"]
    command: Literal["trace connect"]
    started: str
    host: Host
    settings: TraceConnectSettings
    validity: list[Remark]
    results: TraceConnectResults


class TraceAcceptSettings(TypedDict):
    process: int | None
    name: str | None
    listen: str | None
    port: int | None
    netns: str | None
    cgroup: str | None
    for_ns: int | None


class WaitStep(TypedDict):
    from_ns: int
    count: int


class Depth(TypedDict):
    mean: float
    max: int
    backlog: int
    full: int


class TraceWorker(TypedDict):
    process: int
    thread: int
    name: str
    accepts: int
    mean_ns: int
    p50_ns: int
    p99_ns: int
    max_ns: int
    open: int
    reads: int
    empty: int
    woken_for_nothing: int
    closed_first: int
    failed: int
    error: str | None
    processes: NotRequired[int]


class TraceListener(TypedDict):
    address: str
    cookie: int
    namespace: int
    group: int
    closed: bool
    queued: int
    accepts: int
    other_accepts: int
    wait_ns: Distribution | None
    handshake_ns: Distribution | None
    retried_handshakes: int
    depth: Depth
    overflows: int
    overflow_acks: int
    other_drops: int
    ignored: int | None
    never_accepted: int
    closed_by_peer: int
    closed_first: int
    reset: int
    jain: float | None
    workers: list[TraceWorker]


class TraceAcceptResultsCallsSeen(TypedDict):
    seen: Failures


class TraceAcceptResultsSymptomsSeen(TypedDict):
    seen: list[TraceSymptom]


class TraceUnixListener(TypedDict):
    path: str
    cookie: int
    readings: int
    waiting_first: int
    waiting_last: int
    waiting_max: int
    full: int
    backlog: int
    refused: int | None
    owners: list[DoctorOwner]
    workers: list[DoctorOwner]


class TraceAcceptResultsUnixListenersSeen(TypedDict):
    seen: list[TraceUnixListener]


class TraceAcceptResults(TypedDict):
    tier: Literal["tp_btf"]
    elapsed_ns: int
    accepts: int
    accepts_per_s: float
    wait_ns: Distribution | None
    handshake_ns: Distribution | None
    overflows: int
    empty: int
    woken_for_nothing: int
    lost: int
    earlier: int
    histogram: list[WaitStep]
    listeners: list[TraceListener]
    calls: NotRequired[TraceAcceptResultsCallsSeen | DoctorHidden]
    notes: NotRequired[list[str]]
    symptoms: NotRequired[TraceAcceptResultsSymptomsSeen | DoctorHidden]
    unix_listeners: NotRequired[TraceAcceptResultsUnixListenersSeen | DoctorHidden]


class TraceAcceptRecord(TypedDict):
    schema: Literal["fourtuple/1"]
    command: Literal["trace accept"]
    started: str
    host: Host
    settings: TraceAcceptSettings
    validity: list[Remark]
    results: TraceAcceptResults


class TraceLocksSettings(TypedDict):
    process: int | None
    name: str | None
    cgroup: str | None
    for_ns: int | None
    netns: NotRequired[str | None]


LockClass = TypedDict("LockClass", {
    "class": 'Literal["listener", "accept queue", "ehash", "bhash", "time-wait", "socket owner", "other"]',
    "waits": 'int',
    "wait_ns": 'int',
    "sleeps": 'int',
    "sleep_ns": 'int',
    "locks": 'int',
    "times_ns": 'Distribution | None',
    "remedy": 'str',
})


LockPath = TypedDict("LockPath", {
    "class": 'Literal["listener", "accept queue", "ehash", "bhash", "time-wait", "socket owner", "other"]',
    "kind": 'Literal["spin", "sleep"]',
    "frames": 'list[str]',
    "waits": 'int',
    "wait_ns": 'int',
    "max_ns": 'int',
})


class LockPort(TypedDict):
    port: int
    waits: int
    wait_ns: int
    max_ns: int


class TraceLocksResultsSymptomsSeen(TypedDict):
    seen: list[TraceSymptom]


class TraceLocksResults(TypedDict):
    tier: Literal["tp_btf"]
    elapsed_ns: int
    connections: int
    waits: int
    wait_ns: int
    waits_per_connection: float | None
    wait_ns_per_connection: float | None
    cpu_share: float
    lost: int
    elsewhere_waits: int
    elsewhere_wait_ns: int
    classes: list[LockClass]
    paths: list[LockPath]
    ports: list[LockPort]
    blind_spots: list[str]
    notes: NotRequired[list[str]]
    symptoms: NotRequired[TraceLocksResultsSymptomsSeen | DoctorHidden]


class TraceLocksRecord(TypedDict):
    schema: Literal["fourtuple/1"]
    command: Literal["trace locks"]
    started: str
    host: Host
    settings: TraceLocksSettings
    validity: list[Remark]
    results: TraceLocksResults


Record = Union[
    LabRecord,
    LabPortsRecord,
    LabTimeWaitRecord,
    LabAcceptRecord,
    LabKeepaliveRecord,
    LabLocksRecord,
    LabPlanesRecord,
    PlanRecord,
    CompareRecord,
    LoadRecord,
    ServeRecord,
    ForwardRecord,
    FixPortsRecord,
    FixAcceptRecord,
    GuardStatusRecord,
    RunRecord,
    FleetRecord,
    DoctorRecord,
    TraceConnectRecord,
    TraceAcceptRecord,
    TraceLocksRecord,
]
"""The record of any command."""
