//! Deterministic scheduler: one seed decides the order of tasks, I/O completions and timers.
//!
//! A step either polls a task that has been woken or moves one I/O in flight a little further;
//! which one is drawn from the seed. Wakes only mark a task as ready, so nothing runs inside
//! anything else. When nothing can move although tasks are left, the run is [`Deadlock`], and says what
//! every task was doing.

use std::cell::{Ref, RefCell, RefMut};
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use crate::{Random, Trace};

/// I/O in flight.
pub(crate) trait Pending {
    /// Moves on, by chance; true when it is over.
    fn advance(&self, random: &mut Random, trace: &mut Trace) -> bool;

    /// Virtual time before which it does not move.
    fn due_ns(&self) -> u64;

    /// What it is, for a person.
    fn describe(&self) -> String;
}

struct TaskWaker {
    ready: AtomicBool,
}

impl Wake for TaskWaker {
    fn wake(self: Arc<Self>) {
        // Relaxed would do: there is one thread.
        self.ready.store(true, Ordering::SeqCst);
    }
}

struct Task {
    number: u64,
    name: String,
    doing: String,
    flag: Arc<TaskWaker>,
    future: Pin<Box<dyn Future<Output = ()>>>,
}

struct State {
    random: Random,
    trace: Trace,
    now_ns: u64,
    steps: u64,
    io_per_mille: u32,
    next_task: u64,
    spawned: Vec<Task>,
    pending: Vec<Rc<dyn Pending>>,
    timers: Vec<(u64, Waker)>,
    doing: Option<String>,
}

/// Access to a running [`Scheduler`] from inside its tasks and files.
#[derive(Clone)]
pub struct Handle {
    state: Rc<RefCell<State>>,
}

impl fmt::Debug for Handle {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("Handle")
    }
}

impl Handle {
    /// Virtual time since the start in nanoseconds.
    pub fn now_ns(&self) -> u64 {
        self.state.borrow().now_ns
    }

    /// The run's own chance. Do not hold it over an await.
    pub fn random(&self) -> RefMut<'_, Random> {
        RefMut::map(self.state.borrow_mut(), |state| &mut state.random)
    }

    /// The run's trace. Do not hold it over an await.
    pub fn trace(&self) -> RefMut<'_, Trace> {
        RefMut::map(self.state.borrow_mut(), |state| &mut state.trace)
    }

    /// Says what the running task does, for [`Deadlock`] and the trace.
    pub fn doing(&self, what: String) {
        self.state.borrow_mut().doing = Some(what);
    }

    /// Adds a task.
    pub fn spawn(&self, name: &str, future: impl Future<Output = ()> + 'static) {
        let mut state = self.state.borrow_mut();
        let number = state.next_task;
        state.next_task += 1;
        let flag = Arc::new(TaskWaker {
            ready: AtomicBool::new(true),
        });
        let task = Task {
            number,
            name: name.to_owned(),
            doing: String::new(),
            flag,
            future: Box::pin(future),
        };
        state.spawned.push(task);
    }

    /// Ends after `duration_ns` of virtual time.
    pub async fn sleep(&self, duration_ns: u64) {
        let deadline = self.now_ns() + duration_ns;
        std::future::poll_fn(|context| {
            let mut state = self.state.borrow_mut();
            if state.now_ns >= deadline {
                return Poll::Ready(());
            }
            state.timers.push((deadline, context.waker().clone()));
            Poll::Pending
        })
        .await;
    }

    /// Lets other tasks run first.
    pub async fn yield_now(&self) {
        let mut yielded = false;
        std::future::poll_fn(|context| {
            if yielded {
                return Poll::Ready(());
            }
            yielded = true;
            context.waker().wake_by_ref();
            Poll::Pending
        })
        .await;
    }

    pub(crate) fn submit(&self, pending: Rc<dyn Pending>) {
        self.state.borrow_mut().pending.push(pending);
    }
}

/// Why [`Scheduler::run`] came back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// Every task has ended.
    Done,
    /// The steps that were asked for are over.
    Steps,
}

/// Tasks are left and nothing can move.
#[derive(Clone, Debug)]
pub struct Deadlock {
    /// One line per task that is left: its name and what it was doing.
    pub tasks: Vec<String>,
}

impl fmt::Display for Deadlock {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            out,
            "stuck: nothing can move and {} tasks wait",
            self.tasks.len()
        )?;
        self.tasks
            .iter()
            .try_for_each(|task| write!(out, "; {task}"))
    }
}

impl std::error::Error for Deadlock {}

/// The executor. Dropping it drops every task, as a power cut would.
pub struct Scheduler {
    state: Rc<RefCell<State>>,
    tasks: Vec<Task>,
}

impl fmt::Debug for Scheduler {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "Scheduler({} tasks)", self.tasks.len())
    }
}

impl Scheduler {
    /// A scheduler whose every choice comes from `seed`.
    pub fn new(seed: u64, trace: Trace) -> Scheduler {
        let mut random = Random::new(seed);
        // Slow disks pile up requests, fast ones end each before the next begins.
        let io_per_mille = random.pick(&[50, 200, 500, 800, 950]);
        let state = State {
            random,
            trace,
            now_ns: 0,
            steps: 0,
            io_per_mille,
            next_task: 0,
            spawned: Vec::new(),
            pending: Vec::new(),
            timers: Vec::new(),
            doing: None,
        };
        Scheduler {
            state: Rc::new(RefCell::new(state)),
            tasks: Vec::new(),
        }
    }

    /// A handle for tasks and files.
    pub fn handle(&self) -> Handle {
        Handle {
            state: Rc::clone(&self.state),
        }
    }

    /// Steps taken so far.
    pub fn steps(&self) -> u64 {
        self.state.borrow().steps
    }

    /// The trace so far.
    pub fn trace(&self) -> Ref<'_, Trace> {
        Ref::map(self.state.borrow(), |state| &state.trace)
    }

    /// Takes the trace out to go on with it elsewhere.
    pub fn take_trace(&mut self) -> Trace {
        std::mem::take(&mut self.state.borrow_mut().trace)
    }

    /// Runs until every task has ended, or for `steps` steps.
    pub fn run(&mut self, steps: u64) -> Result<Stop, Deadlock> {
        for _ in 0..steps {
            self.tasks.append(&mut self.state.borrow_mut().spawned);
            if self.tasks.is_empty() {
                return Ok(Stop::Done);
            }
            if !self.step() {
                return Err(self.stuck());
            }
        }
        Ok(Stop::Steps)
    }

    /// Runs `future` as the only thing that matters and returns what it gives. `None` when it needs
    /// more than `steps` steps.
    pub fn block_on<T: 'static>(
        &mut self,
        name: &str,
        steps: u64,
        future: impl Future<Output = T> + 'static,
    ) -> Result<Option<T>, Deadlock> {
        let slot = Rc::new(RefCell::new(None));
        let result = Rc::clone(&slot);
        self.handle().spawn(name, async move {
            let value = future.await;
            *result.borrow_mut() = Some(value);
        });
        self.run(steps)?;
        Ok(slot.take())
    }

    /// What every task is doing, one line each.
    pub fn stuck(&self) -> Deadlock {
        let state = self.state.borrow();
        let mut tasks: Vec<String> = self
            .tasks
            .iter()
            .map(|task| format!("{} ({})", task.name, task.doing))
            .collect();
        tasks.extend(
            state
                .pending
                .iter()
                .map(|pending| format!("in flight: {}", pending.describe())),
        );
        Deadlock { tasks }
    }

    fn step(&mut self) -> bool {
        let mut state = self.state.borrow_mut();
        state.steps += 1;
        state.now_ns += 1_000;
        let ready: Vec<usize> = (0..self.tasks.len())
            .filter(|&index| self.is_ready(index))
            .collect();
        let due = state.due();
        if ready.is_empty() && due == 0 {
            return state.jump();
        }
        state.wake_due_timers();
        let io_per_mille = state.io_per_mille;
        let io = due > 0 && (ready.is_empty() || state.random.chance(io_per_mille));
        if io {
            state.advance_one(due);
            return true;
        }
        let index = ready[state.random.index(ready.len())];
        let number = self.tasks[index].number;
        state.trace.record(&[1, number], || {
            format!("run    {}", self.tasks[index].name)
        });
        drop(state);
        self.poll(index);
        true
    }

    fn is_ready(&self, index: usize) -> bool {
        self.tasks[index].flag.ready.load(Ordering::SeqCst)
    }

    fn poll(&mut self, index: usize) {
        let task = &mut self.tasks[index];
        task.flag.ready.store(false, Ordering::SeqCst);
        let waker = Waker::from(Arc::clone(&task.flag));
        let done = task
            .future
            .as_mut()
            .poll(&mut Context::from_waker(&waker))
            .is_ready();
        if let Some(doing) = self.state.borrow_mut().doing.take() {
            task.doing = doing;
        }
        if done {
            drop(self.tasks.swap_remove(index));
        }
    }
}

impl State {
    /// How many transfers could move now.
    fn due(&self) -> usize {
        let due = |pending: &&Rc<dyn Pending>| pending.due_ns() <= self.now_ns;
        self.pending.iter().filter(due).count()
    }

    /// Moves one of the `due` transfers that can.
    fn advance_one(&mut self, due: usize) {
        let chosen = self.random.index(due);
        let now_ns = self.now_ns;
        let mut indexes =
            (0..self.pending.len()).filter(|index| self.pending[*index].due_ns() <= now_ns);
        let Some(index) = indexes.nth(chosen) else {
            return;
        };
        let pending = Rc::clone(&self.pending[index]);
        if pending.advance(&mut self.random, &mut self.trace) {
            self.pending.swap_remove(index);
        }
    }

    /// Goes on to when the next timer or transfer is due; false if there is none.
    fn jump(&mut self) -> bool {
        let timers = self.timers.iter().map(|(deadline, _)| *deadline);
        let transfers = self.pending.iter().map(|pending| pending.due_ns());
        let Some(first) = timers.chain(transfers).min() else {
            return false;
        };
        self.now_ns = self.now_ns.max(first);
        self.wake_due_timers();
        true
    }

    fn wake_due_timers(&mut self) {
        let now_ns = self.now_ns;
        self.timers.retain(|(deadline, waker)| {
            let due = *deadline <= now_ns;
            if due {
                waker.wake_by_ref();
            }
            !due
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deadlocked_task_is_named() {
        let mut scheduler = Scheduler::new(1, Trace::default());
        let handle = scheduler.handle();
        let inner = handle.clone();
        handle.spawn("sleeper", async move {
            inner.doing("waiting for godot".to_owned());
            std::future::pending::<()>().await;
        });
        let stuck = scheduler.run(100).unwrap_err();
        assert_eq!(stuck.tasks, ["sleeper (waiting for godot)"]);
    }

    #[test]
    fn time_jumps_to_the_next_timer_when_nothing_else_can_move() {
        let mut scheduler = Scheduler::new(1, Trace::default());
        let handle = scheduler.handle();
        let inner = handle.clone();
        handle.spawn(
            "sleeper",
            async move { inner.sleep(3_600_000_000_000).await },
        );
        assert_eq!(scheduler.run(100).unwrap(), Stop::Done);
        assert!(handle.now_ns() >= 3_600_000_000_000);
    }

    #[test]
    fn the_order_of_tasks_depends_on_the_seed_and_on_nothing_else() {
        let order = |seed| {
            let mut scheduler = Scheduler::new(seed, Trace::default());
            let handle = scheduler.handle();
            let order = Rc::new(RefCell::new(Vec::new()));
            for number in 0..6 {
                let (inner, order) = (handle.clone(), Rc::clone(&order));
                handle.spawn("task", async move {
                    for _ in 0..5 {
                        order.borrow_mut().push(number);
                        inner.yield_now().await;
                    }
                });
            }
            assert_eq!(scheduler.run(1000).unwrap(), Stop::Done);
            let hash = scheduler.trace().hash();
            (order.take(), hash)
        };
        assert_eq!(order(1), order(1));
        assert_ne!(order(1).0, order(2).0);
    }
}
