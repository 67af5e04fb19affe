//! What the environment says about the output; the one place of the command that reads it.

use std::env;

/// Whether the user wants no colours (<https://no-color.org>).
pub(crate) fn refuses_color() -> bool {
    env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty())
}

/// Whether the terminal's characters are those of Unicode, by the first of the locale's variables
/// that is set. Containers set none, and the terminals around them do take Unicode.
pub(crate) fn takes_unicode() -> bool {
    let set = ["LC_ALL", "LC_CTYPE", "LANG"].iter().filter_map(|name| env::var(name).ok());
    is_unicode(set.into_iter().find(|value| !value.is_empty()).as_deref())
}

fn is_unicode(locale: Option<&str>) -> bool {
    let Some(locale) = locale else { return true };
    let locale = locale.to_ascii_lowercase();
    locale.contains("utf-8") || locale.contains("utf8")
}

#[cfg(test)]
mod tests {
    use super::is_unicode;

    #[test]
    fn a_locale_that_is_not_unicode_gets_ascii() {
        for (locale, unicode) in [
            (None, true),
            (Some("C.UTF-8"), true),
            (Some("de_DE.utf8"), true),
            (Some("C"), false),
            (Some("de_DE.ISO-8859-1"), false),
        ] {
            assert_eq!(is_unicode(locale), unicode, "{locale:?}");
        }
    }
}
