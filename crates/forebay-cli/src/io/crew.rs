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
    /// Nothing more will be heard of it.
    is_silent: bool,
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
        if let Some(number) = self.members.iter().position(|member| member.is_silent) {
            return Err(self.loss_of(number));
        }
        while replies.iter().any(Option::is_none) {
            if self.signals.exit_code().is_some() {
                return Err(anyhow!("interrupted"));
            }
            let (number, line) = match self.heard.recv_timeout(POLL) {
                Ok(heard) => heard,
                Err(RecvTimeoutError::Timeout) => continue,
                Err(RecvTimeoutError::Disconnected) => return Err(anyhow!("no process is left")),
            };
            let Some(line) = line else {
                if replies[number].is_none() {
                    return Err(self.loss_of(number));
                }
                // After its last reply a process ends, maybe before the others have replied.
                self.members[number].is_silent = true;
                continue;
            };
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
    let member = Member { child, stdin, is_silent: false };
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

#[cfg(test)]
mod tests {
    use clap::Parser;
    use serde_json::Value;

    use super::super::arguments::Io;
    use super::*;

    #[derive(Debug, Parser)]
    struct Alone {
        #[command(flatten)]
        io: Io,
    }

    /// Has a shell script in place of the processes.
    struct Script(String);

    impl Host for Script {
        fn facts(&self) -> Result<Option<Value>> {
            Ok(None)
        }

        fn call(&self, _: &str, _: &Value) -> Result<u8> {
            Err(anyhow!("not asked for here"))
        }

        fn ask(&self, _: &str, _: &Value) -> Result<Value> {
            Err(anyhow!("not asked for here"))
        }

        fn command(&self) -> Result<Vec<OsString>> {
            Ok(["sh", "-c", &self.0].map(OsString::from).to_vec())
        }
    }

    /// Two processes that do `last` when they are told to go on, the first at once, the other
    /// later, and then end; told to go on twice.
    fn go_on_twice(last: &str) -> Result<[Result<Vec<Reply>>; 2]> {
        let directory = tempfile::tempdir()?;
        let script = format!(
            "read job; echo '\"Ready\"'; read command; \
             mkdir '{}' 2>/dev/null || sleep 0.5; {last}",
            directory.path().join("first").display()
        );
        let plan = Plan::new(&Alone::try_parse_from(["io", "--processes", "2"])?.io, None)?;
        let signals = Signals::none();
        let mut crew = Crew::start(&plan, &Script(script), &signals)?;
        Ok([crew.all_do(&Command::Prepare), crew.all_do(&Command::Finish)])
    }

    #[test]
    fn a_process_that_ends_after_its_reply_is_missed_only_when_it_is_to_do_more() {
        let [first, second] = go_on_twice("echo '\"Ready\"'").unwrap();
        assert_eq!(first.unwrap().len(), 2);
        assert!(second.unwrap_err().to_string().contains("ended in the middle, with code 0"));
    }

    #[test]
    fn a_process_that_ends_without_a_reply_is_missed_at_once() {
        let [first, _] = go_on_twice("exit 7").unwrap();
        assert!(first.unwrap_err().to_string().contains("ended in the middle, with code 7"));
    }
}
