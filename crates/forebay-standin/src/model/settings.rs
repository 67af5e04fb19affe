//! How the stand-in is set up, and the words for it.

/// How cuFile does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Gds {
    /// `nvidia-fs` is there and takes every file that is open for direct I/O.
    Direct,
    /// There is no `nvidia-fs`, and cuFile goes through the host.
    Compat,
    /// The driver can't be opened.
    Absent,
    /// The driver opens, and no file is taken.
    Unsupported,
    /// There is no `nvidia-fs`, and NVMe drives are reached by the kernel's P2PDMA.
    P2pdma,
}

/// A code that every use of a broken context gives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Breakage {
    code: i32,
    /// `None`: every device.
    device: Option<i32>,
}

impl Breakage {
    /// The code, if this concerns a device.
    pub(crate) fn code_on(self, device: i32) -> Option<i32> {
        self.device.is_none_or(|broken| broken == device).then_some(self.code)
    }
}

/// The calls of a function that fail.
#[derive(Clone, Debug)]
struct Failure {
    symbol: String,
    /// Counted from 1, since the stand-in was reset.
    number: u64,
    /// All calls from that one on.
    and_later: bool,
    code: i32,
}

/// See the [module documentation](self).
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub(crate) devices: i32,
    pub(crate) seed: u64,
    /// The longest that a task is late.
    pub(crate) delay_us: u64,
    pub(crate) gds: Gds,
    /// Reads and writes of cuFile fail as its documentation has it.
    pub(crate) documented: bool,
    /// The error that sticks to every context, or to that of one device.
    pub(crate) broken: Option<Breakage>,
    /// The driver is gone: every function says so.
    pub(crate) deinitialised: bool,
    failures: Vec<Failure>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            devices: 2,
            seed: 1,
            delay_us: 300,
            gds: Gds::Direct,
            documented: false,
            broken: None,
            deinitialised: false,
            failures: Vec::new(),
        }
    }
}

impl Settings {
    /// Reads `key=value` words; see [`Standin::configure`](crate::Standin::configure).
    pub(crate) fn read(&mut self, text: &str) -> Result<(), String> {
        for word in text.split_whitespace() {
            let (key, value) = word.split_once('=').ok_or_else(|| bad(word))?;
            match key {
                "devices" => self.devices = number(word, value)?,
                "seed" => self.seed = number(word, value)?,
                "delay_us" => self.delay_us = number(word, value)?,
                "broken" => self.broken = breakage(word, value)?,
                "deinitialised" => self.deinitialised = number::<u8>(word, value)? != 0,
                "documented" => self.documented = number::<u8>(word, value)? != 0,
                "gds" => self.gds = gds(word, value)?,
                "fail" => self.failures.push(failure(word, value)?),
                _ => return Err(bad(word)),
            }
        }
        Ok(())
    }

    /// The code with which the `number`-th call of a function is to fail.
    pub(crate) fn planned_failure(&self, symbol: &str, number: u64) -> Option<i32> {
        let planned = self.failures.iter().find(|failure| {
            failure.symbol == symbol
                && (failure.number == number || (failure.and_later && number > failure.number))
        });
        planned.map(|failure| failure.code)
    }
}

fn bad(word: &str) -> String {
    format!("{word:?} isn't understood")
}

fn number<T: std::str::FromStr>(word: &str, value: &str) -> Result<T, String> {
    value.parse().map_err(|_| bad(word))
}

fn breakage(word: &str, value: &str) -> Result<Option<Breakage>, String> {
    let (code, device) = match value.split_once('@') {
        Some((code, device)) => (code, Some(number(word, device)?)),
        None => (value, None),
    };
    let breakage = Breakage { code: number(word, code)?, device };
    Ok((breakage.code != 0).then_some(breakage))
}

fn gds(word: &str, value: &str) -> Result<Gds, String> {
    Ok(match value {
        "direct" => Gds::Direct,
        "compat" => Gds::Compat,
        "absent" => Gds::Absent,
        "unsupported" => Gds::Unsupported,
        "p2pdma" => Gds::P2pdma,
        _ => return Err(bad(word)),
    })
}

fn failure(word: &str, value: &str) -> Result<Failure, String> {
    let mut fields = value.split(':');
    let (Some(symbol), Some(call), Some(code), None) =
        (fields.next(), fields.next(), fields.next(), fields.next())
    else {
        return Err(bad(word));
    };
    let (call, and_later) = match call.strip_suffix('+') {
        Some(call) => (call, true),
        None => (call, false),
    };
    Ok(Failure {
        symbol: symbol.to_owned(),
        number: number(word, call)?,
        and_later,
        code: number(word, code)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nth_call_fails_or_all_from_it_on() {
        let mut settings = Settings::default();
        settings.read("devices=3 fail=cuA:2:700 fail=cuB:3+:2").unwrap();
        assert_eq!(settings.devices, 3);
        let failing = |symbol| -> Vec<Option<i32>> {
            (1..5).map(|number| settings.planned_failure(symbol, number)).collect()
        };
        assert_eq!(failing("cuA"), [None, Some(700), None, None]);
        assert_eq!(failing("cuB"), [None, None, Some(2), Some(2)]);
        assert_eq!(failing("cuC"), [None; 4]);
    }

    #[test]
    fn what_is_not_understood_is_named() {
        for text in [
            "devices",
            "devices=x",
            "fail=cuA:1",
            "fail=cuA:x:1",
            "broken=7@",
            "gds=on",
            "colour=red",
        ] {
            let error = Settings::default().read(text).unwrap_err();
            assert!(error.contains(text), "{error}");
        }
    }
}
