//! Connections: how many, how long, how much of a request is read.
//!
//! A place is no one's to keep: whoever comes while all are taken gets that of the one connected longest. So those who hold
//! connections, be it with half a request, a request without an answer read or nothing said at all, keep nobody out: a
//! probe sends its request as soon as it is connected, and is answered before as many others as there are places have come.

use std::collections::VecDeque;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio::task::{AbortHandle, yield_now};
use tokio::time::{sleep, timeout};

/// Files that it takes of the process at most. A page takes one, a scraper another.
const MAX_CONNECTIONS: usize = 64;
/// A request's first line and its headers: the longest chain that fits has 1,900 blocks.
const MAX_HEAD: usize = 80 << 10;
/// From one answer, or the beginning, to the whole head of the next request.
const MAX_HEAD_TIME: Duration = Duration::from_secs(10);
/// Answers are not waited for any longer when the server stops.
const MAX_FAREWELL: Duration = Duration::from_secs(1);
/// The system refuses sockets while the process has too many files open.
const PAUSE: Duration = Duration::from_millis(100);

/// Answers until the sender of `stopped` is gone.
pub(super) async fn serve(socket: TcpListener, app: Router, mut stopped: oneshot::Receiver<()>) {
    let (connections, mut places) = (GracefulShutdown::new(), Places::default());
    loop {
        let accepted = tokio::select! {
            accepted = socket.accept() => accepted,
            _ = &mut stopped => break,
        };
        let Ok((stream, _)) = accepted else {
            sleep(PAUSE).await;
            continue;
        };
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(MAX_HEAD_TIME)
            .max_buf_size(MAX_HEAD)
            .serve_connection(TokioIo::new(stream), TowerToHyperService::new(app.clone()));
        let connection = connections.watch(connection);
        // A client that goes away is no event.
        let task = tokio::spawn(async move { _ = connection.await });
        places.give(task.abort_handle());
        // What it has sent is answered before the next one comes, or a crowd would displace it unheard.
        yield_now().await;
    }
    drop(socket);
    let _ = timeout(MAX_FAREWELL, connections.shutdown()).await;
}

/// Who is connected, the longest first.
#[derive(Debug, Default)]
struct Places(VecDeque<AbortHandle>);

impl Places {
    fn give(&mut self, newest: AbortHandle) {
        self.0.retain(|connection| !connection.is_finished());
        if self.0.len() == MAX_CONNECTIONS
            && let Some(longest) = self.0.pop_front()
        {
            longest.abort();
        }
        self.0.push_back(newest);
    }
}
