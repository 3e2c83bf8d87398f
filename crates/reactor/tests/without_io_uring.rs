//! Machines that forbid io_uring, or the pinning of memory. The tests start themselves again in a
//! process that gives up the right first.

#[path = "scratch/contract.rs"]
mod contract;
#[path = "scratch/files.rs"]
mod scratch;

use std::process::Command;

use gaur_block::{Access, Errno, Host};
use gaur_reactor::{Config, Driver, Reactor, ReactorHost, Stream, spawn, uring};
use scratch::Scratch;

const ROLE: &str = "GAUR_TEST_GIVES_UP";
const WRITE: Access = Access {
    write: true,
    direct: false,
    lock: true,
    force_share: false,
};

/// Runs the test called `name` in a process of its own; `false` in that process.
fn in_a_child(name: &str) -> bool {
    if std::env::var_os(ROLE).is_some() {
        return false;
    }
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--nocapture"])
        .env(ROLE, "1")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    true
}

/// From now on `io_uring_setup` fails with `EPERM`, as in many containers.
fn forbid_io_uring() {
    let jump = |code, k, jt, jf| libc::sock_filter {
        code: code as u16,
        jt,
        jf,
        k,
    };
    let load = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
    let equal = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
    let answer = libc::BPF_RET | libc::BPF_K;
    let refuse = libc::SECCOMP_RET_ERRNO | libc::EPERM as u32;
    let mut program = [
        // The number of the system call is the first word.
        jump(load, 0, 0, 0),
        jump(equal, libc::SYS_io_uring_setup as u32, 0, 1),
        jump(answer, refuse, 0, 0),
        jump(answer, libc::SECCOMP_RET_ALLOW, 0, 0),
    ];
    let filter = libc::sock_fprog {
        len: program.len() as u16,
        filter: program.as_mut_ptr(),
    };
    // SAFETY: the program is valid for the calls, which copy it.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        let mode = libc::SECCOMP_MODE_FILTER;
        assert_eq!(
            libc::prctl(libc::PR_SET_SECCOMP, mode, &raw const filter),
            0
        );
    }
}

#[test]
fn where_io_uring_is_forbidden_the_fallback_does_it_all() {
    if in_a_child("where_io_uring_is_forbidden_the_fallback_does_it_all") {
        return;
    }
    forbid_io_uring();
    let why = uring::available().unwrap_err();
    assert_eq!(why.errno, Errno::EPERM);
    assert_eq!(
        why.to_string(),
        "io_uring is not available here: kernel.io_uring_disabled or a seccomp filter forbids it"
    );
    let ring = Reactor::new(&Config {
        driver: Driver::Ring,
        ..Config::default()
    });
    assert_eq!(ring.err(), Some(Errno::EPERM));
    let reactor = Reactor::new(&Config::default()).unwrap();
    assert!(!reactor.has_ring());
    works(&reactor);
}

#[test]
fn memory_that_may_not_be_pinned_is_used_nevertheless() {
    if in_a_child("memory_that_may_not_be_pinned_is_used_nevertheless") {
        return;
    }
    let scratch = Scratch::on_disk();
    // SAFETY: the limit is read only; the process stays another user's from here on.
    unsafe {
        let none = libc::rlimit {
            rlim_cur: 0,
            rlim_max: 0,
        };
        assert_eq!(libc::setrlimit(libc::RLIMIT_MEMLOCK, &raw const none), 0);
        if libc::geteuid() == 0 {
            let name = std::ffi::CString::new(scratch.file(".")).unwrap();
            assert_eq!(libc::chown(name.as_ptr(), 65534, 65534), 0);
            assert_eq!(libc::setgid(65534), 0);
            assert_eq!(libc::setuid(65534), 0);
        }
    }
    let Ok(reactor) = Reactor::new(&Config {
        driver: Driver::Ring,
        ..Config::default()
    }) else {
        eprintln!("skipped: this kernel wants locked memory for the ring itself");
        return;
    };
    let registered = reactor.block_on(async { gaur_reactor::buffer(4096).registered() });
    assert_eq!(registered, None);
    reactor.block_on(async {
        let name = scratch.file_with("image", &[1; 8192]);
        let file = ReactorHost.open(name.as_ref(), WRITE).await.unwrap();
        contract::write(&file, 0, &[2; 4096]).await.unwrap();
        assert_eq!(contract::read(&file, 0, 4096).await, [2; 4096]);
    });
}

fn works(reactor: &Reactor) {
    let scratch = Scratch::on_disk();
    let name = scratch.file_with("image", &vec![1; 1 << 20]);
    reactor.block_on(async {
        let file = ReactorHost.open(name.as_ref(), WRITE).await.unwrap();
        contract::transfers(&file, 512).await;
        let (ours, theirs) = Stream::pair().unwrap();
        let task = spawn(async move {
            let mut memory = [0; 3];
            theirs.recv_exact(&mut memory).await.map(|_| memory)
        });
        ours.send(b"abc").await.unwrap();
        assert_eq!(task.await, Ok(*b"abc"));
    });
}

#[test]
fn a_tiny_ring_serves_many_at_once() {
    let scratch = Scratch::on_disk();
    let name = scratch.file_with("image", &contract::pattern(1, 1 << 20));
    let expected = contract::pattern(1, 1 << 20);
    let config = Config {
        driver: Driver::Ring,
        entries: 2,
        ..Config::default()
    };
    Reactor::new(&config).unwrap().block_on(async {
        let file = std::rc::Rc::new(ReactorHost.open(name.as_ref(), WRITE).await.unwrap());
        let tasks: Vec<_> = (0..200_usize)
            .map(|index| {
                let file = file.clone();
                spawn(async move {
                    let mut same = true;
                    for round in 0..20 {
                        let offset = (index * 5003 + round * 977) % ((1 << 20) - 4096);
                        let found = contract::read(&*file, offset as u64, 4096).await;
                        same &= found == contract_slice(offset);
                    }
                    same
                })
            })
            .collect();
        for task in tasks {
            assert!(task.await);
        }
    });
    assert_eq!(contract_slice(77), expected[77..77 + 4096]);
}

/// 4 KiB of the pattern above from `offset` on.
fn contract_slice(offset: usize) -> Vec<u8> {
    use std::sync::OnceLock;
    static WHOLE: OnceLock<Vec<u8>> = OnceLock::new();
    WHOLE.get_or_init(|| contract::pattern(1, 1 << 20))[offset..offset + 4096].to_vec()
}
