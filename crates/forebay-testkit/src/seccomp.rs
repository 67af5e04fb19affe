//! Refuses system calls to the current thread, as the seccomp filter of a container does.
//!
//! A filter can't be taken off again: install it in a thread or a child of its own. Threads and
//! children started afterwards inherit it.

#![expect(unsafe_code, reason = "installs a filter by prctl(2)")]

use std::io;

/// `BPF_LD | BPF_W | BPF_ABS`, from `include/uapi/linux/bpf_common.h`, as the next two.
const LOAD_WORD: u16 = 0x20;
/// `BPF_JMP | BPF_JEQ | BPF_K`.
const JUMP_IF_EQUAL: u16 = 0x15;
/// `BPF_RET | BPF_K`.
const RETURN: u16 = 0x06;

/// Makes each of `calls` (`libc::SYS_…`) fail with `code` (an `errno`) in this thread from now on.
///
/// # Errors
///
/// The kernel has no seccomp, or there are more than 250 calls.
pub fn deny(calls: &[libc::c_long], code: i32) -> io::Result<()> {
    let invalid = |_| io::Error::from_raw_os_error(libc::EINVAL);
    // The number of the call is the first word of `struct seccomp_data`.
    let mut filter = vec![statement(LOAD_WORD, 0)];
    for (index, &call) in calls.iter().enumerate() {
        // On a match, jump over the other comparisons and the permission.
        let to_refusal = u8::try_from(calls.len() - index).map_err(invalid)?;
        let call = u32::try_from(call).map_err(invalid)?;
        filter.push(libc::sock_filter { code: JUMP_IF_EQUAL, jt: to_refusal, jf: 0, k: call });
    }
    filter.push(statement(RETURN, libc::SECCOMP_RET_ALLOW));
    filter.push(statement(RETURN, libc::SECCOMP_RET_ERRNO | u32::try_from(code).map_err(invalid)?));
    let program = libc::sock_fprog {
        len: u16::try_from(filter.len()).map_err(invalid)?,
        filter: filter.as_mut_ptr(),
    };
    // SAFETY: it takes numbers only. Without privileges a filter requires it.
    check(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) })?;
    let mode = libc::SECCOMP_MODE_FILTER;
    // SAFETY: the kernel copies the program, whose instructions `filter` holds until after the call.
    check(unsafe { libc::prctl(libc::PR_SET_SECCOMP, mode, &raw const program) })
}

fn statement(code: u16, operand: u32) -> libc::sock_filter {
    libc::sock_filter { code, jt: 0, jf: 0, k: operand }
}

fn check(returned: libc::c_int) -> io::Result<()> {
    if returned < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use forebay_io::engine::WakeEvent;

    use super::*;

    #[test]
    fn a_denied_call_fails_in_its_thread_and_in_no_other() {
        let denied = std::thread::spawn(|| {
            deny(&[libc::SYS_io_setup, libc::SYS_eventfd2], libc::EXDEV).unwrap();
            (WakeEvent::new().unwrap_err().os_code(), std::fs::metadata("/").is_ok())
        });
        assert_eq!(denied.join().unwrap(), (Some(libc::EXDEV), true));
        WakeEvent::new().unwrap();
    }
}
