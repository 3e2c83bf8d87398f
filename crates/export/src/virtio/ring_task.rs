//! The task of one ring. It lives as long as the server, and runs the ring when commanded to.

use std::rc::Rc;

use gaur_block::Device;

use super::ring_command::RingCommand;
use super::running_ring::{self, RunningRing};
use super::thread_context::ThreadContext;
use crate::serve::Channel;

/// Follows commands until [`RingCommand::End`].
pub(super) async fn run<D: Device + 'static>(
    context: Rc<ThreadContext<D>>,
    index: u16,
    commands: Channel<RingCommand>,
) {
    loop {
        match commands.take().await {
            RingCommand::Start(setup) => {
                let ring = RunningRing::new(&context, index, *setup);
                let answer = running_ring::serve(&ring, &commands).await;
                answer.put(Some(ring.next()));
            }
            RingCommand::Stop(answer) => answer.put(None),
            RingCommand::End => return,
            other => attend(&context, other).await,
        }
    }
}

/// Commands that need no running ring.
pub(super) async fn attend<D: Device>(context: &ThreadContext<D>, command: RingCommand) {
    match command {
        RingCommand::Geometry(answer) => answer.put(context.geometry()),
        #[cfg(feature = "vduse")]
        RingCommand::Position(answer) => answer.put(None),
        RingCommand::Flush(answer) => answer.put(context.flush().await),
        RingCommand::Start(_) | RingCommand::Stop(_) | RingCommand::Call(_) | RingCommand::End => {}
    }
}
