//! Compiles the C programs of `bindings/c` against the header and the library of this build, and runs them: plain, under AddressSanitizer
//! and under valgrind. `FOURTUPLE_CONNECTS` is the number of connects of the event loop, 2,000 by default.
#![forbid(unsafe_code)]

use std::env;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use fourtuple_testing::{in_namespace, listener, set_sysctl, skip};

/// Returns the directory of this test, in which cargo puts libfourtuple_c.so and libfourtuple_c.a too.
fn built() -> PathBuf {
    let program = env::current_exe().expect("a running test has a path");
    program.parent().expect("a program is in a directory").to_owned()
}

fn tree(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

/// How a program is linked and run.
#[derive(Clone, Copy, Debug)]
enum Way {
    Shared,
    Sanitized,
    Valgrind,
}

/// The runtime of AddressSanitizer of this compiler, if the library is built with it (.ci/asan).
fn runtime() -> Option<PathBuf> {
    env::var_os("FOURTUPLE_ASAN_RUNTIME").map(PathBuf::from)
}

/// Returns how the tests link programs. With the runtime of this compiler, both forms of the library check their own accesses.
fn ways() -> &'static [Way] {
    if runtime().is_some() {
        &[Way::Shared, Way::Sanitized]
    } else {
        &[Way::Shared, Way::Sanitized, Way::Valgrind]
    }
}

/// Compiles a program. Returns the command that runs it, or `None` after a skip of the test.
fn program(test: &str, source: &str, way: Way) -> Option<Command> {
    program_with(test, source, way, &[])
}

/// As [`program`], with flags for other libraries.
fn program_with(test: &str, source: &str, way: Way, libraries: &[&str]) -> Option<Command> {
    let built = built();
    let runtime = runtime();
    let name = Path::new(source).file_stem().expect("a file name").to_string_lossy().into_owned();
    let flags: &[&str] = match way {
        _ if runtime.is_some() => &["-fsanitize=address"],
        Way::Sanitized => &["-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
        Way::Shared | Way::Valgrind => &[],
    };
    // Two tests may compile one program at the same time.
    let output = built.join(format!("c-{name}-{test}-{way:?}"));
    let object = output.with_extension("o");
    let mut compiler = Command::new("cc");
    compiler.args(["-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-g", "-O1"]).args(flags);
    compiler.args(libraries.iter().filter(|flag| flag.starts_with("-I")));
    compiler.arg("-I").arg(tree("bindings/c")).arg("-c").arg(tree(source)).arg("-o").arg(&object);
    let mut linker = Command::new("cc");
    match runtime {
        // Of gcc's flags, the linker would take the runtime of gcc.
        Some(runtime) => linker.arg("-Wl,--no-as-needed").arg(runtime),
        None => linker.args(flags),
    };
    linker.arg(&object).arg("-o").arg(&output);
    match way {
        // The name in the program is the soname, which the next lines link to this build.
        Way::Shared => {
            linker.arg(built.join("libfourtuple_c.so")).arg(format!("-Wl,-rpath,{}", built.display()))
        }
        Way::Sanitized | Way::Valgrind => {
            linker.arg(built.join("libfourtuple_c.a")).args(["-lm", "-ldl", "-lpthread"])
        }
    };
    linker.args(libraries.iter().filter(|flag| flag.starts_with("-l")));
    for mut command in [compiler, linker] {
        match command.output() {
            Ok(ended) if ended.status.success() => {}
            Ok(ended) => panic!("cc {source}: {}", String::from_utf8_lossy(&ended.stderr)),
            Err(error) => {
                skip(test, "cc", &error.to_string());
                return None;
            }
        }
    }
    if matches!(way, Way::Valgrind) {
        if let Err(error) = Command::new("valgrind").arg("--version").output() {
            skip(test, "valgrind", &error.to_string());
            return None;
        }
        let mut command = Command::new("valgrind");
        command.args(["--quiet", "--leak-check=full", "--errors-for-leak-kinds=definite,possible"]);
        command.arg(format!("--suppressions={}", tree("bindings/c/valgrind.supp").display()));
        command.arg("--error-exitcode=99").arg(output);
        return Some(command);
    }
    let mut command = Command::new(output);
    // Programs load the library by its soname.
    let links = built.join("c-links");
    fs::create_dir_all(&links).expect("a directory in the build");
    let link = links.join("libfourtuple.so.0");
    if fs::symlink_metadata(&link).is_err() {
        // Another test may make it at the same time.
        let _ = std::os::unix::fs::symlink(built.join("libfourtuple_c.so"), &link);
    }
    command.env("LD_LIBRARY_PATH", links);
    Some(command)
}

fn succeed(output: &Output) -> String {
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{}: {out}{err}", output.status);
    // The leak checker and valgrind write reports to stderr.
    assert_eq!(err, "", "{out}");
    out.trim().to_owned()
}

#[test]
fn c_takes_the_steps_of_the_vectors() {
    let test = "c_takes_the_steps_of_the_vectors";
    for name in ["kernel-default", "full-range", "select-test-repeat", "random-window", "auto"] {
        let Some(mut command) = program(test, "bindings/c/tests/vectors.c", Way::Shared) else { return };
        command.arg(name).arg(tree(&format!("bindings/vectors/{name}.json")));
        assert_eq!(succeed(&command.output().expect("a built program")), "1000", "{name}");
    }
}

#[test]
fn each_error_has_its_kind_in_c() {
    in_namespace(|| {
        set_sysctl("net.ipv4.ip_local_port_range", "20000 20007");
        let (_listener, destination) = listener("127.0.0.1", 1024);
        for &way in ways() {
            let test = "each_error_has_its_kind_in_c";
            let Some(mut command) = program(test, "bindings/c/tests/errors.c", way) else { return };
            command.arg(destination.ip().to_string()).arg(destination.port().to_string());
            assert_eq!(succeed(&command.output().expect("a built program")), env!("CARGO_PKG_VERSION"));
        }
    });
}

/// The ledger of `auto` names a port that is free, so no connect() fails while an abandoned attempt leaves its port marked as in use.
#[test]
fn an_attempt_abandoned_after_success_keeps_its_port() {
    in_namespace(|| {
        set_sysctl("net.ipv4.ip_local_port_range", "20000 20999");
        let (_listener, destination) = listener("127.0.0.1", 2048);
        let test = "an_attempt_abandoned_after_success_keeps_its_port";
        let Some(mut command) = program(test, "bindings/c/tests/errors.c", Way::Shared) else { return };
        command.arg(destination.ip().to_string()).arg(destination.port().to_string());
        command.args(["auto", "1000"]);
        let said = succeed(&command.output().expect("a built program"));
        assert_eq!(said, "1000 connections, 0 failed connects");
    });
}

#[test]
fn the_event_loop_is_clean_under_sanitizers() {
    in_namespace(|| {
        let connects: u32 =
            env::var("FOURTUPLE_CONNECTS").map_or(2000, |text| text.parse().expect("a number"));
        set_sysctl("net.ipv4.ip_local_port_range", "20000 20999");
        let server = TcpListener::bind((Ipv4Addr::LOCALHOST, 4000)).expect("a listener");
        thread::Builder::new()
            .name("server".to_owned())
            .spawn(move || {
                while let Ok((mut stream, _)) = server.accept() {
                    // The client may end early.
                    let _ = stream.write_all(b"hello");
                }
            })
            .expect("a thread");
        for &way in ways() {
            for strategy in ["auto", "full-range", "select-test-repeat"] {
                let test = "the_event_loop_is_clean_under_sanitizers";
                let Some(mut command) = program(test, "bindings/c/examples/epoll.c", way) else { return };
                let connects = if strategy == "auto" { connects } else { 200 };
                command.args(["127.0.0.1", "4000", &connects.to_string(), "16", strategy]);
                let said = succeed(&command.output().expect("a built program"));
                assert_eq!(said, format!("{connects} served, 0 failed"), "{strategy}");
            }
        }
    });
}

/// A server process, ended and waited for on drop; its files are in the directory.
struct Server {
    process: Child,
    directory: PathBuf,
}

impl Drop for Server {
    fn drop(&mut self) {
        if self.directory.join("PG_VERSION").exists() {
            // PostgreSQL ends at once, with all processes.
            let _ = Command::new("kill").args(["-QUIT", &self.process.id().to_string()]).status();
        } else {
            // A program that a script starts in the background ignores SIGQUIT.
            let _ = self.process.kill();
        }
        let _ = self.process.wait();
        let _ = fs::remove_dir_all(&self.directory);
    }
}

impl Server {
    /// Starts a server of a library as another user, if it refuses root, and waits until it listens.
    fn start(name: &str, port: u16, words: &[&str]) -> Server {
        let directory = env::temp_dir().join(format!("fourtuple-c-{name}-{}", std::process::id()));
        fs::create_dir_all(&directory).expect("a directory");
        let place = directory.to_str().expect("a path of text").to_owned();
        let mut command = Command::new(words[0]);
        if name == "postgres" {
            chown(&directory, Some(65_534), Some(65_534)).expect("root changes owners");
            let programs = Path::new(words[0]).parent().expect("a directory");
            let mut initdb = as_other(programs.join("initdb").to_str().expect("a path of text"));
            initdb.args(["--no-sync", "-A", "trust", "-U", "tester", "-D", &place]);
            let made = initdb.output().expect("setpriv");
            assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
            command = as_other(words[0]);
            command.args(["-D", &place]);
        }
        command.args(&words[1..]).current_dir(&directory).stdout(Stdio::null()).stderr(Stdio::null());
        let server = Server { process: command.spawn().expect(name), directory };
        let deadline = Instant::now() + Duration::from_secs(60);
        while TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_err() {
            assert!(Instant::now() < deadline, "{name} does not listen");
            thread::sleep(Duration::from_millis(20));
        }
        server
    }
}

/// Returns a command as nobody: PostgreSQL refuses to run as root.
fn as_other(program: &str) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--reuid=65534", "--regid=65534", "--clear-groups", program]);
    command
}

/// Compiles a program with another library, and runs it as in docs/c.md: to a server with free ports, and without a free port. `serve`
/// starts the server, as a process or as a thread of the test, and returns `None` after a skip.
fn try_with_library(
    test: &'static str,
    header: &str,
    libraries: &'static [&'static str],
    port: u16,
    words: &'static [&'static str],
    serve: fn() -> Option<Option<Server>>,
) {
    let mut compiler = Command::new("cc");
    compiler.args(libraries.iter().filter(|flag| flag.starts_with("-I")));
    let found = compiler.args(["-fsyntax-only", "-include", header, "-x", "c", "/dev/null"]).output();
    if !found.is_ok_and(|output| output.status.success()) {
        return skip(test, "programs", &format!("no {header}"));
    }
    in_namespace(move || {
        set_sysctl("net.ipv4.ip_local_port_range", "20000 20999");
        let Some(_server) = serve() else { return };
        let source = format!("bindings/c/examples/{test}.c");
        let address = ["127.0.0.1", &port.to_string()].map(str::to_owned);
        for &way in ways() {
            let Some(mut command) = program_with(test, &source, way, libraries) else { return };
            let said =
                succeed(&command.args(&address).args(words).arg("20").output().expect("a built program"));
            let ports: Vec<u16> = said.lines().map(|line| line.parse().expect("a port")).collect();
            assert!(
                ports.len() == 20 && ports.iter().all(|port| (20_000..21_000).contains(port)),
                "{ports:?}"
            );
            // The kernel alone gives ports of one parity until they are all in use.
            assert!(ports.iter().any(|port| port % 2 != ports[0] % 2), "{way:?}: {ports:?}");
        }
        set_sysctl("net.ipv4.ip_local_port_range", "21000 21007");
        let open = |_| TcpStream::connect((Ipv4Addr::LOCALHOST, port)).expect("a free port");
        let _held: Vec<TcpStream> = (0..8).map(open).collect();
        for &way in ways() {
            let Some(mut command) = program_with(test, &source, way, libraries) else { return };
            let output = command.args(&address).args(words).arg("1").output().expect("a built program");
            let told = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(1), "{way:?}: {told}");
            assert!(
                told.contains("no source port is left") && told.contains("of 8 ports 8"),
                "{way:?}: {told}"
            );
        }
    });
}

#[test]
fn libcurl_sends_requests_from_prepared_sockets() {
    try_with_library("curl", "curl/curl.h", &["-lcurl"], 4000, &[], || {
        let server = TcpListener::bind((Ipv4Addr::LOCALHOST, 4000)).expect("a listener");
        let answer = |stream: TcpStream| {
            let mut lines = BufReader::new(&stream).lines();
            // Connections that only hold a port end here.
            while lines.next().is_some_and(|line| line.is_ok_and(|line| !line.is_empty())) {}
            let _ =
                (&stream).write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok");
        };
        let accept = move || {
            while let Ok((stream, _)) = server.accept() {
                thread::Builder::new().spawn(move || answer(stream)).expect("a thread");
            }
        };
        thread::Builder::new().name("server".to_owned()).spawn(accept).expect("a thread");
        Some(None)
    });
}

#[test]
fn hiredis_takes_connected_descriptors() {
    try_with_library("hiredis", "hiredis/hiredis.h", &["-lhiredis"], 6379, &[], || {
        if Command::new("redis-server").arg("--version").output().is_err() {
            skip("hiredis", "programs", "no redis-server");
            return None;
        }
        let words = ["redis-server", "--bind", "127.0.0.1", "--save", "", "--port", "6379"];
        Some(Some(Server::start("redis", 6379, &words)))
    });
}

#[test]
fn libpq_connects_by_the_connect_of_the_program() {
    let libraries = &["-I/usr/include/postgresql", "-lpq"];
    try_with_library("libpq", "libpq-fe.h", libraries, 5432, &["user=tester dbname=postgres"], || {
        let versions = fs::read_dir("/usr/lib/postgresql").into_iter().flatten();
        let programs = versions.map(|version| version.expect("an entry").path().join("bin/postgres"));
        let newest = programs.filter(|program| program.exists()).max();
        let may_change_user = as_other("true").output().is_ok_and(|ran| ran.status.success());
        let Some(postgres) = newest.filter(|_| may_change_user) else {
            skip("libpq", "programs", "no postgres, or no right to run it as another user");
            return None;
        };
        let postgres = postgres.to_str().expect("a path of text");
        let words = [
            postgres,
            "-p",
            "5432",
            "-c",
            "listen_addresses=127.0.0.1",
            "-c",
            "unix_socket_directories=",
            "-c",
            "fsync=off",
        ];
        Some(Some(Server::start("postgres", 5432, &words)))
    });
}

#[test]
fn the_library_exports_the_functions_of_the_header() {
    let header = fs::read_to_string(tree("bindings/c/fourtuple.h")).expect("the header");
    let mut declared: Vec<&str> = header
        .lines()
        .filter(|line| line.starts_with(|c: char| c.is_ascii_lowercase()) && line.contains("fourtuple_"))
        .filter_map(|line| line.split_once('('))
        .filter_map(|(before, _)| before.rsplit([' ', '*']).next())
        .collect();
    declared.sort_unstable();
    let mut nm = Command::new("nm");
    nm.args(["--dynamic", "--defined-only", "--format=just-symbols"]).arg(built().join("libfourtuple_c.so"));
    let output = match nm.output() {
        Ok(output) => succeed(&output),
        Err(error) => {
            return skip("the_library_exports_the_functions_of_the_header", "cc", &error.to_string());
        }
    };
    let mut exported: Vec<&str> = output.lines().collect();
    exported.sort_unstable();
    assert_eq!(exported, declared);
    let abi = tree("bindings/c/fourtuple.abi");
    let lines = declarations(&header);
    if env::var_os("FOURTUPLE_WRITE").is_some() {
        fs::write(&abi, &lines).unwrap_or_else(|error| panic!("{}: {error}", abi.display()));
    }
    let stored = fs::read_to_string(&abi).unwrap_or_else(|error| panic!("{}: {error}", abi.display()));
    assert_eq!(
        lines, stored,
        "a changed or removed line breaks programs that are linked with libfourtuple.so.0, an added line does not; \
         FOURTUPLE_WRITE=1 writes the file"
    );
}

/// Returns the declarations of the header, one a line, without comments, in their order.
fn declarations(header: &str) -> String {
    let code: String = header
        .split("/*")
        .enumerate()
        .map(|(index, part)| if index == 0 { part } else { after_comment(part) })
        .collect();
    let mut declarations = String::new();
    let mut depth = 0_i32;
    for line in code.lines() {
        let is_guard =
            ["#if", "#endif", "#include", "extern \"C\""].iter().any(|start| line.starts_with(start));
        // The end of `extern "C"`.
        if is_guard || line == "}" {
            continue;
        }
        for word in line.split_whitespace() {
            declarations.push_str(word);
            declarations.push(' ');
        }
        depth += line.matches('{').count() as i32 - line.matches('}').count() as i32;
        if depth == 0 && (line.trim_end().ends_with(';') || line.starts_with('#')) {
            declarations.truncate(declarations.trim_end().len());
            declarations.push('\n');
        }
    }
    declarations
}

fn after_comment(text: &str) -> &str {
    text.split_once("*/").map_or("", |(_, after)| after)
}
