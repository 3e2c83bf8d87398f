//! Models of the way into a reactor: a message that was left is read, also when the reactor was about to
//! sleep. A message that is forgotten shows as a deadlock.

use gaur_model::{check, thread};

use super::*;

/// What a reactor does between two looks at its inbox when it has nothing to do; see
/// `Core::visit_kernel`. `woken_otherwise` is a sleep that ends by something else than the event,
/// which then stays as it is.
fn turn(inbox: &Inbox, into: &mut VecDeque<Message>, woken_otherwise: bool) {
    let sleep = inbox.fall_asleep();
    if sleep && !woken_otherwise {
        inbox.event().wait();
        inbox.event().clear();
    }
    if sleep {
        inbox.wake_up();
    }
    inbox.take(into);
}

/// Calls every message; how many there were.
fn read(messages: &mut VecDeque<Message>) -> usize {
    let count = messages.len();
    for message in messages.drain(..) {
        match message {
            Message::Run(run) => run(),
            Message::Wake(_) => unreachable!("there is no task"),
        }
    }
    count
}

fn send(inbox: &Inbox) -> bool {
    inbox.send(Message::Run(Box::new(|| ()))).is_ok()
}

#[test]
fn a_reactor_that_falls_asleep_is_woken_by_every_sender() {
    check(|| {
        let inbox = Inbox::new().unwrap();
        let senders = [0, 1].map(|_| {
            let inbox = Arc::clone(&inbox);
            thread::spawn(move || assert!(send(&inbox)))
        });
        let (mut messages, mut count) = (VecDeque::new(), 0);
        while count < 2 {
            turn(&inbox, &mut messages, false);
            count += read(&mut messages);
        }
        for sender in senders {
            sender.join().unwrap();
        }
    });
}

#[test]
fn a_wake_up_by_something_else_loses_no_message() {
    check(|| {
        let inbox = Inbox::new().unwrap();
        let sender = thread::spawn({
            let inbox = Arc::clone(&inbox);
            move || {
                assert!(send(&inbox));
                assert!(send(&inbox));
            }
        });
        let (mut messages, mut count) = (VecDeque::new(), 0);
        turn(&inbox, &mut messages, true);
        count += read(&mut messages);
        while count < 2 {
            turn(&inbox, &mut messages, false);
            count += read(&mut messages);
        }
        sender.join().unwrap();
    });
}

#[test]
fn a_message_is_read_or_given_back_when_the_reactor_ends() {
    check(|| {
        let inbox = Inbox::new().unwrap();
        let sender = thread::spawn({
            let inbox = Arc::clone(&inbox);
            move || send(&inbox)
        });
        let (mut messages, mut count) = (VecDeque::new(), 0);
        while !inbox.close_if_empty() {
            inbox.take(&mut messages);
            count += read(&mut messages);
        }
        let sent = sender.join().unwrap();
        assert_eq!(count, usize::from(sent));
        assert!(!send(&inbox));
    });
}
