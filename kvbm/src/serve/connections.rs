//! Connections: how many, how long, how much of a request is read.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, oneshot};
use tokio::time::{sleep, timeout};

/// Who comes when so many are connected waits. A page takes one, a scraper another.
const MAX_CONNECTIONS: usize = 64;
/// A request's first line and its headers: the longest chain that fits has 1,900 blocks.
const MAX_HEAD: usize = 80 << 10;
/// A client that does not get on with its next request for so long is disconnected.
const MAX_SILENCE: Duration = Duration::from_secs(30);
/// Answers are not waited for any longer when the server stops.
const MAX_FAREWELL: Duration = Duration::from_secs(1);
/// The system refuses sockets while the process has too many files open.
const PAUSE: Duration = Duration::from_millis(100);

/// Answers until the sender of `stopped` is gone.
pub(super) async fn serve(socket: TcpListener, app: Router, mut stopped: oneshot::Receiver<()>) {
    let connections = GracefulShutdown::new();
    let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    loop {
        let next = async {
            let place = Arc::clone(&places).acquire_owned().await.expect("nobody closes it");
            (place, socket.accept().await)
        };
        let (place, accepted) = tokio::select! {
            next = next => next,
            _ = &mut stopped => break,
        };
        let Ok((stream, _)) = accepted else {
            sleep(PAUSE).await;
            continue;
        };
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(MAX_SILENCE)
            .max_buf_size(MAX_HEAD)
            .serve_connection(TokioIo::new(stream), TowerToHyperService::new(app.clone()));
        let connection = connections.watch(connection);
        tokio::spawn(async move {
            // A client that goes away is no event.
            let _ = connection.await;
            drop(place);
        });
    }
    drop(socket);
    let _ = timeout(MAX_FAREWELL, connections.shutdown()).await;
}
