//! Which reactor belongs to this thread. A thread has at most one.

use std::cell::RefCell;
use std::rc::Rc;

use crate::reactor::Core;

thread_local! {
    static CURRENT: RefCell<Option<Rc<Core>>> = const { RefCell::new(None) };
}

/// Calls `look` with this thread's reactor, or none, also when the thread is ending.
pub(crate) fn with<R>(look: impl FnOnce(Option<&Rc<Core>>) -> R) -> R {
    let mut look = Some(look);
    let found = CURRENT.try_with(|current| {
        let current = current.borrow();
        look.take().map(|look| look(current.as_ref()))
    });
    match (found, look) {
        (Ok(Some(result)), _) => result,
        (_, Some(look)) => look(None),
        _ => unreachable!("the function is called once"),
    }
}

/// This thread's reactor.
///
/// # Panics
/// When the thread has none.
pub(crate) fn current() -> Rc<Core> {
    find().expect("this needs a reactor, and the thread has none")
}

/// This thread's reactor, if it has one.
pub(crate) fn find() -> Option<Rc<Core>> {
    with(|core| core.cloned())
}

/// Makes `core` this thread's reactor, or none.
pub(crate) fn set(core: Option<Rc<Core>>) {
    let before = CURRENT.with(|current| std::mem::replace(&mut *current.borrow_mut(), core));
    drop(before);
}

/// Whether this thread has a reactor: sockets and timers then wait in it, elsewhere they block.
pub fn has_reactor() -> bool {
    with(|core| core.is_some())
}
