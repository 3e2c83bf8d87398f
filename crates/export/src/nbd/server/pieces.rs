//! Requests for whose payload there is no memory at once: the reader of a connection serves them piece
//! by piece, in the piece it has, while nothing else of the connection is under way.

use std::io::IoSlice;

use gaur_block::{Device, Request};

use super::client_task::{End, Reader};
use super::job::Job;
use crate::nbd::proto::{Command, Kind, Style, reply};

/// Whether a job has less memory than its payload is long, and cannot do with that.
pub(super) fn needed(job: &mut Job) -> bool {
    let moves = matches!(job.command.kind, Kind::Read { .. } | Kind::Write);
    moves && (job.payload().len() as u64) < job.command.len_bytes
}

impl<D: Device + 'static> Reader<'_, D> {
    pub(super) async fn serve_in_pieces(&mut self, mut job: Box<Job>) -> Result<(), End> {
        self.connection.begin(&mut job);
        let done = match job.command.kind {
            Kind::Write => self.write_in_pieces(&mut job).await,
            _ => self.read_in_pieces(&mut job).await,
        };
        match done {
            // The reply is still to be sent.
            Ok(true) => self.connection.post(job),
            Ok(false) => self.connection.end(job),
            Err(end) => {
                self.connection.end(job);
                return Err(end);
            }
        }
        Ok(())
    }

    async fn write_in_pieces(&mut self, job: &mut Job) -> Result<bool, End> {
        let command = job.command;
        let (mut offset_bytes, mut done) = (command.offset_bytes, Ok(()));
        let end = offset_bytes + command.len_bytes;
        while offset_bytes < end {
            let len = (job.payload().len() as u64).min(end - offset_bytes);
            let piece = &mut job.payload()[..len as usize];
            self.receive(piece).await?;
            // After an error the rest is received and forgotten.
            if done.is_ok() {
                let source = (&*piece).into();
                done = self
                    .connection
                    .disk()
                    .write(offset_bytes, source, false)
                    .await;
            }
            offset_bytes += len;
        }
        if command.fua && done.is_ok() {
            done = self.connection.disk().ask(Request::Flush).await;
        }
        match done {
            Ok(()) => job.succeed(),
            Err(errno) => job.fail(errno, errno.text()),
        }
        Ok(true)
    }

    /// Whether there is something left to send.
    async fn read_in_pieces(&mut self, job: &mut Job) -> Result<bool, End> {
        let Command {
            kind, len_bytes, ..
        } = job.command;
        let mut offset_bytes = job.command.offset_bytes;
        let in_one = self.connection.session.style == Style::Simple
            || matches!(kind, Kind::Read { unfragmented: true });
        let (start, end) = (offset_bytes, offset_bytes + len_bytes);
        while offset_bytes < end {
            let len = (job.payload().len() as u64).min(end - offset_bytes);
            let asked = job.asked;
            let done = offset_bytes + len == end;
            let target = (&mut job.payload()[..len as usize]).into();
            if let Err(errno) = self.connection.disk().read(offset_bytes, target).await {
                // Of data that was announced in one piece nothing but all of it can be sent.
                if in_one && offset_bytes > start {
                    return Err(End::Failed(errno));
                }
                job.fail(errno, errno.text());
                return Ok(true);
            }
            let header = match in_one {
                true => reply::read(&asked, len_bytes as u32),
                false => reply::data(&asked, offset_bytes, len as u32, done),
            };
            let header = match in_one && offset_bytes > start {
                true => &[],
                false => &*header,
            };
            let parts = [
                IoSlice::new(header),
                IoSlice::new(&job.payload()[..len as usize]),
            ];
            let sent = self.client.stream.send_vectored(&parts).await;
            sent.map_err(End::Failed)?;
            offset_bytes += len;
        }
        Ok(false)
    }
}
