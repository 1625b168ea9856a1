//! Serves HTTP/1.1 with hyper, on a tokio runtime per worker, and prints the counters of each worker at the end.
//!
//! `cargo run -p fourtuple --example accept -- --policy rotate --listen 127.0.0.1:8080 --workers 4`, ended
//! with Ctrl-C. `--listen /run/x.sock` is a unix socket; `--close-every 100` closes connections after 100 requests.
#![forbid(unsafe_code)]

use std::convert::Infallible;
use std::env;
use std::error::Error;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use fourtuple::listen::{
    AcceptPolicy, AsyncAcceptor, AsyncConnection, Endpoint, ListenerGroup, ListenerGroupBuilder, Recycle,
    Workers,
};
use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{CONNECTION, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::watch;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

struct Arguments {
    policy: AcceptPolicy,
    listen: Endpoint,
    workers: usize,
    recycle: Recycle,
}

fn arguments() -> Result<Arguments, Box<dyn Error>> {
    let mut found = Arguments {
        policy: AcceptPolicy::Auto,
        listen: Endpoint::Inet(([127, 0, 0, 1], 8080).into()),
        workers: 4,
        recycle: Recycle::Never,
    };
    let mut arguments = env::args().skip(1);
    while let Some(flag) = arguments.next() {
        let value = arguments.next().ok_or_else(|| format!("{flag}: no value"))?;
        let wrong = |error: &dyn Error| format!("{flag} {value}: {error}");
        match flag.as_str() {
            "--policy" => found.policy = value.parse().map_err(|error| wrong(&error))?,
            "--listen" => found.listen = value.parse().map_err(|error| wrong(&error))?,
            "--workers" => found.workers = value.parse().map_err(|error| wrong(&error))?,
            "--close-every" => {
                found.recycle = Recycle::Requests(value.parse().map_err(|error| wrong(&error))?);
            }
            _ => {
                return Err(format!("{flag}: expected --policy, --listen, --workers or --close-every").into());
            }
        }
    }
    Ok(found)
}

fn runtime() -> std::io::Result<Runtime> {
    Builder::new_current_thread().enable_all().build()
}

fn run() -> Result<(), Box<dyn Error>> {
    let Arguments { policy, listen, workers, recycle } = arguments()?;
    let group = ListenerGroupBuilder::at(listen).workers(Workers::Runtimes).policy(policy);
    let group = group.max_workers(workers).recycle(recycle).open()?;
    eprintln!("listening on {}, {workers} workers, {}", group.endpoint(), group.choice());
    // With this policy one thread accepts for all workers.
    let dispatcher = (group.policy() == AcceptPolicy::Dispatcher).then(|| group.dispatcher()).transpose()?;
    let over = AtomicBool::new(false);
    let (stop, stopped) = watch::channel(());
    thread::scope(|scope| {
        let dispatcher = dispatcher.map(|mut dispatcher| {
            let over = &over;
            scope.spawn(move || dispatcher.run(over).map_err(|error| error.to_string()))
        });
        let threads: Vec<_> = (0..workers)
            .map(|_| {
                let stopped = stopped.clone();
                let group = &group;
                scope.spawn(move || work(group, stopped).map_err(|error| error.to_string()))
            })
            .collect();
        runtime()?.block_on(tokio::signal::ctrl_c())?;
        drop(stop);
        let mut ended: Vec<_> = threads.into_iter().map(|thread| thread.join()).collect();
        // The dispatcher stops after the workers, because it takes the connections that they hand over.
        over.store(true, Ordering::Release);
        ended.extend(dispatcher.map(|thread| thread.join()));
        for thread in ended {
            thread.map_err(|_| "a thread panicked")??;
        }
        Ok::<(), Box<dyn Error>>(())
    })?;
    println!("worker  accepted    requests    wakeups    open");
    for (worker, stats) in group.stats().iter().enumerate() {
        println!(
            "{worker:>6} {:>9} {:>11} {:>10} {:>7}",
            stats.accepts, stats.requests, stats.wakeups, stats.open
        );
    }
    Ok(())
}

/// Runs one worker, with its own runtime and acceptor.
fn work(group: &ListenerGroup, mut stopped: watch::Receiver<()>) -> Result<(), Box<dyn Error>> {
    runtime()?.block_on(async {
        // This replaces `TcpListener::bind(address).await?`.
        let mut acceptor = AsyncAcceptor::new(group.join()?)?;
        loop {
            tokio::select! {
                accepted = acceptor.accept() => drop(tokio::spawn(serve(accepted?))),
                _ = stopped.changed() => break,
            }
        }
        acceptor.leave().await?;
        Ok(())
    })
}

async fn serve(connection: AsyncConnection) {
    // hyper reads the further requests.
    let handle = connection.handle();
    let answer = service_fn(move |_: Request<Incoming>| {
        let last = handle.should_close();
        handle.response_sent();
        async move {
            let mut response = Response::new(Full::new(Bytes::from_static(b"hello\n")));
            if last {
                response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
            }
            Ok::<_, Infallible>(response)
        }
    });
    // A client may close the connection in the middle of a request.
    let _ = http1::Builder::new().serve_connection(TokioIo::new(connection), answer).await;
}
