//! A machine's state over a control socket, both ways.

use std::io::IoSlice;
use std::sync::Arc;

use gaur_block::Errno;
use gaur_engine::{Job, NewSnapshot};
use gaur_reactor::{Either, Stream, race, spawn, timeout};
use serde_json::json;

use super::frames::{HEAD_BYTES, Head};
use super::line::Inbound;
use super::protocol::{Answer, Event};
use super::session::{self, Gone, Session};
use crate::exporter::CommandUse;
use crate::snapshot_facts::SnapshotInfo;
use crate::state_pipe::{Piece, Receiver, Sender, pipe};
use crate::vm_state;

/// How the client's stream ended.
enum Fed {
    /// It was all there.
    Complete,
    /// The client gave up.
    Aborted,
    /// The client is gone.
    Gone,
    /// The engine gave up.
    Unwanted,
}

/// Makes a snapshot with the state that the client sends.
pub async fn save(
    session: &mut Session,
    controlled: &CommandUse,
    new: NewSnapshot,
) -> Result<(), Gone> {
    let queue = session::queue(controlled);
    let name = controlled.shared().name().to_owned();
    if let Err(failure) = vm_state::check_new(&queue, &name, &new).await {
        return session.fail(&failure).await;
    }
    let (sender, receiver, handle) = pipe();
    let job = Arc::new(Job::default());
    let theirs = Arc::clone(&job);
    let mut task =
        spawn(async move { vm_state::save(&queue, &name, &new, receiver, &theirs).await });
    let fed = match session.answer(&Answer::Event(Event::Ready)).await {
        Err(Gone) => Either::Left(Fed::Gone),
        Ok(()) => {
            let Session {
                context,
                stream,
                inbound,
            } = session;
            let over = session::given_up(context, controlled.ending());
            let other = race(&mut task, over);
            race(feed(stream, inbound, sender), other).await
        }
    };
    let give_up = || {
        handle.cancel();
        job.cancel();
    };
    let (outcome, next) = match fed {
        Either::Left(Fed::Complete) => (
            session.follow(task, &job, controlled.ending()).await,
            Ok(()),
        ),
        Either::Left(Fed::Aborted) => {
            give_up();
            (session.report(task, &job).await, Ok(()))
        }
        // The rest of the stream would be taken for commands.
        Either::Left(Fed::Unwanted) => (task.await, Err(Gone)),
        Either::Right(Either::Left(outcome)) => (outcome, Err(Gone)),
        Either::Left(Fed::Gone) | Either::Right(Either::Right(())) => {
            give_up();
            (session.report(task, &job).await, Err(Gone))
        }
    };
    let outcome = outcome.map(|snapshot| json!(SnapshotInfo::new(&snapshot)));
    session.conclude(outcome).await?;
    next
}

/// Passes the client's frames on.
async fn feed(stream: &Stream, inbound: &mut Inbound, sender: Sender) -> Fed {
    let mut piece: Option<(Piece, usize)> = None;
    loop {
        let mut head = [0; HEAD_BYTES];
        if let Err(Gone) = inbound.exact(stream, &mut head).await {
            return Fed::Gone;
        }
        let mut rest = match Head::decode(head) {
            Head::Abort => return Fed::Aborted,
            Head::Data(len) => len as usize,
            Head::End => {
                if let Some((last, filled)) = piece {
                    send(&sender, last, filled);
                }
                sender.finish();
                return Fed::Complete;
            }
        };
        while rest > 0 {
            let (mut current, filled) = match piece.take() {
                Some(current) => current,
                None => match sender.piece().await {
                    Ok(empty) => (empty, 0),
                    Err(_) => return Fed::Unwanted,
                },
            };
            let room = current.len() - filled;
            let part = rest.min(room);
            let into = current.get_mut(filled..filled + part);
            if let Err(Gone) = inbound.exact(stream, into.unwrap_or_default()).await {
                return Fed::Gone;
            }
            rest -= part;
            match part == room {
                true => send(&sender, current, filled + part),
                false => piece = Some((current, filled + part)),
            }
        }
    }
}

fn send(sender: &Sender, mut piece: Piece, len: usize) {
    piece.truncate(len);
    sender.send(piece);
}

/// Sends the client the state of a snapshot.
pub async fn extract(
    session: &mut Session,
    controlled: &CommandUse,
    which: &str,
) -> Result<(), Gone> {
    let queue = session::queue(controlled);
    let name = controlled.shared().name().to_owned();
    let snapshot = match vm_state::find(&queue, &name, which).await {
        Ok(snapshot) => snapshot,
        Err(failure) => return session.fail(&failure).await,
    };
    let size = snapshot.vm_state_size;
    session
        .answer(&Answer::Event(Event::State { size }))
        .await?;
    let (sender, receiver, _) = pipe();
    let which = which.to_owned();
    let task = spawn(async move { vm_state::extract(&queue, &name, &which, sender).await });
    let over = session::given_up(&session.context, controlled.ending());
    let passed = race(pass(&session.stream, receiver), over).await;
    // Whatever became of the client, the receiver is gone now, and the task ends.
    let outcome = task.await;
    let head = match (&passed, &outcome) {
        (Either::Left(Ok(())), Ok(())) => Head::End,
        (Either::Left(Ok(())), Err(_)) => Head::Abort,
        _ => return Err(Gone),
    };
    let sent = timeout(session::ANSWER_LIMIT, session.stream.send(&head.encode())).await;
    if !matches!(sent, Some(Ok(()))) {
        return Err(Gone);
    }
    let result = json!(SnapshotInfo::new(&snapshot));
    session.conclude(outcome.map(|()| result)).await
}

/// Sends pieces as frames until there are no more; an error is the socket's.
async fn pass(stream: &Stream, receiver: Receiver) -> Result<(), Errno> {
    while let Ok(Some(piece)) = receiver.next().await {
        let head = Head::of(piece.len()).encode();
        let parts = [IoSlice::new(&head), IoSlice::new(&piece)];
        stream.send_vectored(&parts).await?;
        receiver.give_back(piece);
    }
    Ok(())
}
