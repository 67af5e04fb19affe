//! Writes results to standard output and complaints to standard error, whatever those can take.
//!
//! An object is written with its schema, `forebay.NAME/1`, as the first field. With `--json`, a
//! failure is an object as well, so that whoever reads the output always finds one.

use std::io::{self, ErrorKind, IsTerminal, Write};

use anstyle::Style;
use serde::Serialize;
use serde_json::Value;

use crate::config;
use crate::exit::{Exit, Failure};

/// Version of all schemas: it changes when a field goes or means something else.
const SCHEMA_VERSION: u32 = 1;

/// Where results go, and in what form.
#[derive(Debug)]
pub(crate) struct Output {
    json: bool,
    color: bool,
    unicode: bool,
}

/// An object behind the name of its schema.
#[derive(Serialize)]
struct Named<'a, T> {
    schema: String,
    #[serde(flatten)]
    object: &'a T,
}

/// What is printed of a failure with `--json`.
#[derive(Serialize)]
struct Complaint {
    message: String,
    exit: u8,
}

impl Output {
    pub(crate) fn new(json: bool, no_color: bool) -> Self {
        let color = !no_color && !config::refuses_color() && io::stdout().is_terminal();
        Self { json, color, unicode: config::takes_unicode() }
    }

    /// Whether results are JSON.
    pub(crate) fn is_json(&self) -> bool {
        self.json
    }

    /// Text in a style, if it may have colours.
    pub(crate) fn styled(&self, style: Style, text: &str) -> String {
        if self.color { format!("{style}{text}{style:#}") } else { text.to_owned() }
    }

    /// Writes text, its signs in ASCII where the terminal has no others.
    pub(crate) fn text(&self, text: &str) -> anyhow::Result<()> {
        let text = if self.unicode { text.to_owned() } else { in_ascii(text) };
        write_bytes(text.as_bytes())
    }

    /// Writes one JSON object of the schema `name`.
    pub(crate) fn object(&self, name: &str, object: &impl Serialize) -> anyhow::Result<()> {
        let named = Named { schema: schema(name), object };
        self.text(&format!("{}\n", serde_json::to_string_pretty(&named)?))
    }

    /// Options for a subcommand written in Python, with `json`: the form of the result.
    pub(crate) fn with_form(&self, options: &impl Serialize) -> anyhow::Result<Value> {
        let mut options = serde_json::to_value(options)?;
        options["json"] = self.json.into();
        Ok(options)
    }

    /// Turns what the command came to into its exit code, and says what went wrong.
    pub(crate) fn end(&self, done: anyhow::Result<u8>) -> u8 {
        let error = match done {
            Ok(code) => return code,
            Err(error) => error,
        };
        if is_broken_pipe(&error) {
            // Whoever read the output has seen enough.
            return Exit::Done as u8;
        }
        let exit = error.downcast_ref::<Failure>().map_or(Exit::Failed, Failure::exit);
        self.fail(&format!("{error:#}"), exit)
    }

    fn fail(&self, message: &str, exit: Exit) -> u8 {
        complain(&format!("forebay: {}", printable(message)));
        if self.json {
            let complaint = Complaint { message: message.to_owned(), exit: exit as u8 };
            // The output may be what failed, and the complaint is on standard error already.
            let _ = self.object("error", &complaint);
        }
        exit as u8
    }

    /// Prints help, the version, or what is wrong with the arguments.
    pub(crate) fn usage(&self, error: &clap::Error) -> u8 {
        if error.use_stderr() && self.json {
            let text = error.render().to_string();
            let message = text.strip_prefix("error: ").unwrap_or(&text).trim_end();
            return self.fail(message, Exit::Usage);
        }
        match (error.use_stderr(), error.print().and_then(|()| io::stdout().flush())) {
            (true, _) => Exit::Usage as u8,
            (false, Err(error)) => self.end(Err(anyhow::Error::new(error).context(UNWRITABLE))),
            (false, Ok(())) => Exit::Done as u8,
        }
    }
}

/// Writes bytes to standard output as they are.
pub(crate) fn write_bytes(bytes: &[u8]) -> anyhow::Result<()> {
    let mut stdout = io::stdout().lock();
    let written = stdout.write_all(bytes).and_then(|()| stdout.flush());
    written.map_err(|error| anyhow::Error::new(error).context(UNWRITABLE))
}

/// Signs of the command's own, and what stands for them in ASCII. Names of files stay as they are.
const ASCII_SIGNS: [(char, &str); 14] = [
    ('✓', "+"),
    ('·', "-"),
    ('✗', "x"),
    ('×', "x"),
    ('…', "..."),
    ('µ', "u"),
    ('▁', "_"),
    ('▂', "."),
    ('▃', ","),
    ('▄', "-"),
    ('▅', "="),
    ('▆', "+"),
    ('▇', "*"),
    ('█', "#"),
];

fn in_ascii(text: &str) -> String {
    ASCII_SIGNS.iter().fold(text.to_owned(), |text, (sign, ascii)| text.replace(*sign, ascii))
}

/// Text without what would steer the terminal: control characters but the end of a line, and those
/// that turn the direction of writing. Names of files can hold anything.
pub(crate) fn printable(text: &str) -> String {
    let steers = |sign: char| {
        sign != '\n' && sign.is_control()
            || matches!(sign, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}')
            || matches!(sign, '\u{2066}'..='\u{2069}')
    };
    let mut printable = String::with_capacity(text.len());
    for sign in text.chars() {
        if steers(sign) {
            printable.extend(sign.escape_default());
        } else {
            printable.push(sign);
        }
    }
    printable
}

/// What is said where standard output takes nothing.
const UNWRITABLE: &str = "cannot write to standard output";

fn schema(name: &str) -> String {
    format!("forebay.{name}/{SCHEMA_VERSION}")
}

/// Writes a line to standard error, if that can be done: there is nowhere else to say so.
pub(crate) fn complain(text: &str) {
    let _ = writeln!(io::stderr().lock(), "{text}");
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error
        .chain()
        .filter_map(|cause| cause.downcast_ref::<io::Error>())
        .any(|cause| cause.kind() == ErrorKind::BrokenPipe)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signs_have_ascii_for_terminals_without_others() {
        assert_eq!(in_ascii("✓ a\n✗ größe × 2…"), "+ a\nx größe x 2...");
    }

    #[test]
    fn nothing_in_a_name_steers_the_terminal() {
        let name = "a\u{1b}[31m\r\u{9b}b\u{202e}größe\n";
        assert_eq!(printable(name), "a\\u{1b}[31m\\r\\u{9b}b\\u{202e}größe\n");
    }

    #[test]
    fn an_object_starts_with_its_schema() {
        let complaint = Complaint { message: "no".to_owned(), exit: 3 };
        let named = Named { schema: schema("error"), object: &complaint };
        let text = serde_json::to_string(&named).unwrap();
        assert_eq!(text, r#"{"schema":"forebay.error/1","message":"no","exit":3}"#);
    }

    #[test]
    fn a_reader_that_goes_away_is_no_failure() {
        let output = Output { json: false, color: false, unicode: true };
        let gone = anyhow::Error::new(io::Error::from(ErrorKind::BrokenPipe)).context(UNWRITABLE);
        assert_eq!(output.end(Err(gone)), 0);
    }

    #[test]
    fn a_failure_has_its_own_code() {
        let output = Output { json: false, color: false, unicode: true };
        assert_eq!(output.end(Err(Failure::environment("no drive").into())), 3);
        assert_eq!(output.end(Err(anyhow::anyhow!("it failed"))), 1);
    }

    #[test]
    fn styles_are_for_those_who_take_colors() {
        let mut output = Output { json: false, color: false, unicode: true };
        assert_eq!(output.styled(Style::new().bold(), "a"), "a");
        output.color = true;
        assert_eq!(output.styled(Style::new().bold(), "a"), "\u{1b}[1ma\u{1b}[0m");
    }
}
