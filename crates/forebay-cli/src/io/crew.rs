//! The processes that do the work, started and spoken to.
//!
//! Each has a process group of its own, so that Ctrl-C on a terminal reaches this process alone,
//! which then ends them and cleans up behind them.

use std::ffi::OsString;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, ChildStdin, Command as Process, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};

use super::plan::Plan;
use super::protocol::{Command, Reply};
use crate::exit::{Exit, Failure};
use crate::host::Host;
use crate::signals::Signals;

/// How long a signal may go unnoticed.
const POLL: Duration = Duration::from_millis(50);

/// The processes. Dropping it ends them.
#[derive(Debug)]
pub(super) struct Crew<'a> {
    members: Vec<Member>,
    heard: Receiver<(usize, Option<String>)>,
    signals: &'a Signals,
}

#[derive(Debug)]
struct Member {
    child: Child,
    /// `None` once it has been closed.
    stdin: Option<ChildStdin>,
}

impl Drop for Member {
    fn drop(&mut self) {
        // One that has come to its end is not harmed, and one that hasn't has nothing to lose.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl<'a> Crew<'a> {
    /// Starts a process for each job, and waits until all of them are ready.
    pub(super) fn start(plan: &Plan, host: &dyn Host, signals: &'a Signals) -> Result<Self> {
        let command = host.command()?;
        let (sender, heard) = mpsc::channel();
        let mut crew = Self { members: Vec::new(), heard, signals };
        for number in 0..plan.processes.len() {
            crew.members.push(start_one(&command, number, sender.clone())?);
        }
        for (member, (_, job)) in crew.members.iter_mut().zip(&plan.processes) {
            member.say(&serde_json::to_string(job)?);
        }
        crew.replies()?;
        Ok(crew)
    }

    /// Has all processes do something at the same time; returns their replies in order.
    pub(super) fn all_do(&mut self, command: &Command) -> Result<Vec<Reply>> {
        let line = serde_json::to_string(command)?;
        for member in &mut self.members {
            member.say(&line);
        }
        self.replies()
    }

    /// One reply of each process.
    fn replies(&mut self) -> Result<Vec<Reply>> {
        let mut replies: Vec<Option<Reply>> = self.members.iter().map(|_| None).collect();
        while replies.iter().any(Option::is_none) {
            if self.signals.exit_code().is_some() {
                return Err(anyhow!("interrupted"));
            }
            let (number, line) = match self.heard.recv_timeout(POLL) {
                Ok(heard) => heard,
                Err(RecvTimeoutError::Timeout) => continue,
                Err(RecvTimeoutError::Disconnected) => return Err(anyhow!("no process is left")),
            };
            let Some(line) = line else { return Err(self.loss_of(number)) };
            let reply = serde_json::from_str(&line)
                .with_context(|| format!("process {number} said {line:?}"))?;
            if let Reply::Failed { exit, text } = reply {
                return Err(failure(exit, number, &text));
            }
            replies[number] = Some(reply);
        }
        Ok(replies.into_iter().flatten().collect())
    }

    /// What became of a process that says nothing more.
    fn loss_of(&mut self, number: usize) -> anyhow::Error {
        let member = &mut self.members[number];
        member.stdin = None;
        match member.child.wait() {
            Ok(status) => anyhow!("process {number} {}", how_it_ended(status)),
            Err(error) => anyhow!("process {number} is lost: {error}"),
        }
    }
}

fn how_it_ended(status: ExitStatus) -> String {
    match (status.signal(), status.code()) {
        (Some(9), _) => "was killed by signal 9; was there too little memory?".to_owned(),
        (Some(signal), _) => format!("was killed by signal {signal}"),
        (None, code) => format!("ended in the middle, with code {}", code.unwrap_or_default()),
    }
}

fn failure(exit: u8, number: usize, text: &str) -> anyhow::Error {
    let text = format!("process {number}: {text}");
    match exit {
        code if code == Exit::Environment as u8 => Failure::environment(text).into(),
        code if code == Exit::Usage as u8 => Failure::usage(text).into(),
        _ => anyhow!(text),
    }
}

impl Member {
    /// Sends a line. A process that isn't there any more is noticed by its silence.
    fn say(&mut self, line: &str) {
        if let Some(stdin) = &mut self.stdin {
            let _ = writeln!(stdin, "{line}").and_then(|()| stdin.flush());
        }
    }
}

fn start_one(
    command: &[OsString],
    number: usize,
    sender: Sender<(usize, Option<String>)>,
) -> Result<Member> {
    let (program, arguments) = command.split_first().context("there is no command to start")?;
    let mut child = Process::new(program)
        .args(arguments)
        .args(["io", "--as-process"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .process_group(0)
        .spawn()
        .with_context(|| format!("cannot start {}", program.display()))?;
    let stdin = child.stdin.take();
    let stdout = child.stdout.take();
    let member = Member { child, stdin };
    thread::spawn(move || {
        for line in stdout.into_iter().flat_map(|stdout| BufReader::new(stdout).lines()) {
            let Ok(line) = line else { break };
            if sender.send((number, Some(line))).is_err() {
                return;
            }
        }
        // Nobody listens any more where this fails.
        let _ = sender.send((number, None));
    });
    Ok(member)
}
