//! One client of a control socket: a command, its answers, the next command.

use std::convert::Infallible;
use std::future::pending;
use std::num::NonZeroU64;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use gaur_engine::{ErrorKind, Job, Queue, Shares, Snapshot, find_snapshot};
use gaur_reactor::{Either, ReactorFile, Stop, Stream, race, sleep, spawn, timeout};
use serde_json::{Value, json};

use super::exports;
use super::line::Inbound;
use super::protocol::{Answer, Command, Event, Request, Resizing, VERSION};
use super::server::Context;
use super::state;
use crate::check_facts::CheckFacts;
use crate::exporter::{CommandUse, Export};
use crate::failure::Failure;
use crate::snapshot_facts::SnapshotInfo;
use crate::snapshot_operation::{Operation, now};
use crate::stream_facts::StreamFacts;

/// Time between two lines of progress.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(200);
/// Time after which a client hears of a command that makes no progress: the server lives.
const LIFE_INTERVAL: Duration = Duration::from_millis(500);
/// Time after which work with a limit may go on.
const PACE_INTERVAL: Duration = Duration::from_millis(20);
/// A client that does not take an answer for so long is gone.
pub const ANSWER_LIMIT: Duration = Duration::from_secs(10);

/// A client.
pub struct Session {
    pub context: Rc<Context>,
    pub stream: Stream,
    pub inbound: Inbound,
}

/// The client is gone, or does not know where it is in the stream.
pub struct Gone;

/// Serves a client to its end.
pub async fn serve(context: Rc<Context>, stream: Stream) {
    let mut session = Session {
        context,
        stream,
        inbound: Inbound::default(),
    };
    while session.next().await.is_ok() {}
}

impl Session {
    async fn next(&mut self) -> Result<(), Gone> {
        let context = Rc::clone(&self.context);
        let over = race(context.closing.stopped(), context.cancel.stopped());
        let line = match race(over, self.inbound.line(&self.stream)).await {
            Either::Left(_) => return Err(Gone),
            Either::Right(line) => line?,
        };
        let Some(line) = line else {
            self.fail(&Failure::new("the line is too long")).await?;
            return Err(Gone);
        };
        match Request::parse(&line) {
            Ok(request) => self.execute(&context, request).await,
            Err(reason) => {
                let failure = Failure::new(reason).kind(ErrorKind::InvalidInput);
                self.fail(&failure).await
            }
        }
    }

    async fn execute(&mut self, context: &Context, request: Request) -> Result<(), Gone> {
        let Request { export, command } = request;
        let command = match self.about_exports(context, export.clone(), command).await {
            Ok(next) => return next,
            Err(command) => command,
        };
        let used = match context.exporter.command(export.as_deref()) {
            Ok(used) => used,
            Err(failure) => return self.fail(&failure).await,
        };
        let controlled = &used.1;
        match command {
            Command::Ping {}
            | Command::ExportAdd(_)
            | Command::ExportList {}
            | Command::ExportRemove(_) => Ok(()),
            Command::ExportResize(resizing) => self.resize(context, used, resizing).await,
            Command::List {} => {
                let list = queue(controlled).snapshots().await;
                let list = list.map_err(|error| failed(controlled, &error));
                let told = |list: Vec<Snapshot>| {
                    json!(list.iter().map(SnapshotInfo::new).collect::<Vec<_>>())
                };
                self.conclude(list.map(told)).await
            }
            Command::Info { snapshot } => {
                let found = queue(controlled).snapshots().await;
                let found = found.and_then(|all| find_snapshot(&all, &snapshot).cloned());
                let found = found.map_err(|error| failed(controlled, &error));
                self.conclude(found.map(|found| json!(SnapshotInfo::new(&found))))
                    .await
            }
            Command::Check {} => self.check(controlled).await,
            Command::Stream { rate } => self.stream(controlled, rate).await,
            Command::Change(Operation::Apply { .. }) => self.fail(&refuse_apply(controlled)).await,
            Command::Change(operation) => self.change(controlled, operation).await,
            Command::Save(new) => state::save(self, controlled, new.snapshot(now())).await,
            Command::Extract { snapshot } => state::extract(self, controlled, &snapshot).await,
        }
    }

    /// Does what is not about the inside of an image; any other command comes back.
    async fn about_exports(
        &self,
        context: &Context,
        export: Option<String>,
        command: Command,
    ) -> Result<Result<(), Gone>, Command> {
        let exporter = &context.exporter;
        let outcome = match command {
            Command::Ping {} => Ok(greeting(context)),
            Command::ExportList {} => Ok(json!(exporter.all_facts())),
            Command::ExportAdd(add) => {
                let added = exports::add(exporter, export, *add);
                self.report(added, &Job::default()).await
            }
            Command::ExportRemove(how) => {
                let removed = exports::remove(exporter, export, how);
                self.report(removed, &Job::default()).await
            }
            Command::ExportResize(_) if export.is_none() => {
                exports::named(export).map(|_| json!({}))
            }
            command => return Err(command),
        };
        Ok(self.conclude(outcome).await)
    }

    async fn change(&self, controlled: &CommandUse, operation: Operation) -> Result<(), Gone> {
        let job = Arc::new(Job::default());
        let (queue, theirs) = (queue(controlled), Arc::clone(&job));
        let name = controlled.shared().name().to_owned();
        let task = spawn(async move {
            let done = operation.run(&queue, &theirs).await;
            done.map_err(|error| Failure::image(&name, &error))
        });
        let done = self.follow(task, &job, controlled.ending()).await;
        self.conclude(done.map(|snapshot| json!(SnapshotInfo::new(&snapshot))))
            .await
    }

    async fn check(&self, controlled: &CommandUse) -> Result<(), Gone> {
        let job = Arc::new(Job::default());
        let (queue, theirs) = (queue(controlled), Arc::clone(&job));
        let name = controlled.shared().name().to_owned();
        let task = spawn(async move {
            let checked = queue.check(&theirs).await;
            checked
                .map(|checked| json!(CheckFacts::new(&name, &checked)))
                .map_err(|error| Failure::image(&name, &error))
        });
        let checked = self.follow(task, &job, controlled.ending()).await;
        self.conclude(checked).await
    }

    async fn stream(&self, controlled: &CommandUse, rate: Option<NonZeroU64>) -> Result<(), Gone> {
        let job = Arc::new(Job::default());
        let (queue, theirs) = (queue(controlled), Arc::clone(&job));
        let name = controlled.shared().name().to_owned();
        if rate.is_some() {
            job.allow(1);
        }
        let task = spawn(async move {
            let streamed = queue.stream(&Shares::default(), &theirs).await;
            streamed.map_err(|error| Failure::image(&name, &error))
        });
        let paced = async {
            let Some(rate) = rate else {
                return task.await;
            };
            match race(task, pace(&job, rate)).await {
                Either::Left(streamed) => streamed,
                Either::Right(never) => match never {},
            }
        };
        let streamed = self.follow(paced, &job, controlled.ending()).await;
        let name = controlled.shared().name();
        self.conclude(streamed.map(|bytes| json!(StreamFacts::new(name, bytes))))
            .await
    }

    async fn resize(
        &self,
        context: &Context,
        used: (Arc<Export>, CommandUse),
        resizing: Resizing,
    ) -> Result<(), Gone> {
        let job = Arc::new(Job::default());
        let ending = used.1.ending().clone();
        let task = exports::resize(&context.exporter, used, resizing, &job);
        let resized = self.follow(task, &job, &ending).await;
        self.conclude(resized).await
    }

    /// Waits for a task and tells how far it is. Whatever the client sends meanwhile, and its leaving,
    /// asks for the end of the task, and so does the end of the server or of the image.
    pub async fn follow<T>(
        &self,
        task: impl Future<Output = Result<T, Failure>>,
        job: &Job,
        ending: &Stop,
    ) -> Result<T, Failure> {
        let listening = async {
            let mut byte = [0];
            let over = given_up(&self.context, ending);
            race(self.stream.recv(&mut byte), over).await;
            job.cancel();
            pending::<Infallible>().await
        };
        match race(self.report(task, job), listening).await {
            Either::Left(outcome) => outcome,
            Either::Right(never) => match never {},
        }
    }

    /// Waits for a task and tells how far it is, or that it is still under way.
    pub async fn report<T>(
        &self,
        task: impl Future<Output = Result<T, Failure>>,
        job: &Job,
    ) -> Result<T, Failure> {
        let mut task = pin!(task);
        let (mut shown, mut shown_at) = ((0, 0), Instant::now());
        loop {
            if let Either::Left(outcome) = race(&mut task, sleep(PROGRESS_INTERVAL)).await {
                return outcome;
            }
            let (done, total) = job.progress_bytes();
            if (done, total) == shown && shown_at.elapsed() < LIFE_INTERVAL {
                continue;
            }
            (shown, shown_at) = ((done, total), Instant::now());
            if let Err(Gone) = self
                .answer(&Answer::Event(Event::Progress { done, total }))
                .await
            {
                job.cancel();
                return task.await;
            }
        }
    }

    /// Sends the last answer to a command.
    pub async fn conclude(&self, outcome: Result<Value, Failure>) -> Result<(), Gone> {
        match outcome {
            Ok(result) => self.answer(&Answer::Result { result }).await,
            Err(failure) => self.fail(&failure).await,
        }
    }

    /// Tells why a command failed.
    pub async fn fail(&self, failure: &Failure) -> Result<(), Gone> {
        self.answer(&Answer::failure(failure)).await
    }

    /// Sends a line.
    pub async fn answer(&self, answer: &Answer) -> Result<(), Gone> {
        match timeout(ANSWER_LIMIT, self.stream.send(&answer.line())).await {
            Some(Ok(())) => Ok(()),
            Some(Err(_)) | None => Err(Gone),
        }
    }
}

/// Raises the limit of a job as time goes by.
async fn pace(job: &Job, rate: NonZeroU64) -> Infallible {
    let start = Instant::now();
    loop {
        sleep(PACE_INTERVAL).await;
        let bytes = u128::from(rate.get()) * start.elapsed().as_micros() / 1_000_000;
        job.allow(u64::try_from(bytes).unwrap_or(u64::MAX));
    }
}

/// Waits until commands about an image are given up: the server ends, or the image is to be closed.
pub async fn given_up(context: &Context, ending: &Stop) {
    race(context.cancel.stopped(), ending.stopped()).await;
}

fn greeting(context: &Context) -> Value {
    json!({
        "program": "gaur",
        "version": env!("CARGO_PKG_VERSION"),
        "protocol": VERSION,
        "exports": context.exporter.all_facts(),
    })
}

fn refuse_apply(controlled: &CommandUse) -> Failure {
    let message = "cannot be set back while it is served: its disk would change under its clients";
    let failure = Failure::about(controlled.shared().name(), message).kind(ErrorKind::Unsupported);
    failure.hint("end the server first, or serve the snapshot with 'gaur serve --snapshot'")
}

/// A queue for one command.
pub fn queue(controlled: &CommandUse) -> Queue<ReactorFile> {
    controlled.shared().queue::<ReactorFile>()
}

/// The failure of an operation on an image.
pub fn failed(controlled: &CommandUse, error: &gaur_engine::ImageError) -> Failure {
    Failure::image(controlled.shared().name(), error)
}
