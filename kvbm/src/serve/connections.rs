//! Connections: how many, how long, how much of a request is read.
//!
//! If all places are taken, a new connection gets that of the oldest one. So connections that are
//! held, with half a request, an unread answer or no request at all, keep no one out: a probe sends
//! its request as soon as it is connected, and is answered before that many others have come.

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

/// Most files of the process that it takes. A page takes one, a scraper another.
const MAX_CONNECTIONS: usize = 64;
/// A request's first line and its headers: the longest chain that fits has 1,900 blocks.
const MAX_HEAD: usize = 80 << 10;
/// From one answer, or the beginning, to the end of the next request's head.
const MAX_HEAD_TIME: Duration = Duration::from_secs(10);
/// How long a stopping server waits for answers.
const MAX_FAREWELL: Duration = Duration::from_secs(1);
/// How long to wait when the process has too many files open for a socket.
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
        // Answer its request before the next one comes, or a crowd would displace it first.
        yield_now().await;
    }
    drop(socket);
    let _ = timeout(MAX_FAREWELL, connections.shutdown()).await;
}

/// The open connections, oldest first.
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
