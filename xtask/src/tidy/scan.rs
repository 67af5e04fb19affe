//! Tells code, comments and strings apart, so that rules look only where they mean to.
//!
//! Both scanners return texts of the same shape as their input: what is left out is replaced by
//! spaces, line breaks stay, so line numbers agree.

use std::iter::Peekable;
use std::str::Chars;

/// A Rust source, taken apart.
#[derive(Debug)]
pub(super) struct Rust {
    /// The code, with comments and the insides of literals blanked out.
    pub(super) code: String,
    /// The comments, doc comments included, with everything else blanked out.
    pub(super) comments: String,
}

#[derive(Clone, Copy)]
enum Place {
    Code,
    LineComment,
    BlockComment { depth: usize },
    Text { hashes: Option<usize> },
}

/// Takes a Rust source apart. Good enough for sources that compile.
pub(super) fn rust(text: &str) -> Rust {
    let mut parts = Rust { code: String::new(), comments: String::new() };
    let mut place = Place::Code;
    let mut chars = text.chars().peekable();
    while let Some(char) = chars.next() {
        let next = chars.peek().copied();
        match place {
            Place::Code => place = in_code(char, next, &mut chars, &mut parts),
            Place::LineComment => {
                parts.comment(char);
                if char == '\n' {
                    place = Place::Code;
                }
            }
            Place::BlockComment { depth } => {
                parts.comment(char);
                let pair = next.map(|next| (char, next));
                let depth = match pair {
                    Some(('/', '*')) => depth + 1,
                    Some(('*', '/')) => depth - 1,
                    _ => continue,
                };
                parts.comment(chars.next().unwrap_or(' '));
                place = if depth == 0 { Place::Code } else { Place::BlockComment { depth } };
            }
            Place::Text { hashes } => {
                parts.blank(char);
                if char == '\\' && hashes.is_none() {
                    parts.blank(chars.next().unwrap_or(' '));
                } else if char == '"' && take_hashes(hashes.unwrap_or(0), &mut chars, &mut parts) {
                    place = Place::Code;
                }
            }
        }
    }
    parts
}

fn in_code(
    char: char,
    next: Option<char>,
    chars: &mut Peekable<Chars<'_>>,
    parts: &mut Rust,
) -> Place {
    match (char, next) {
        ('/', Some('/')) => {
            parts.comment(char);
            return Place::LineComment;
        }
        ('/', Some('*')) => {
            parts.comment(char);
            parts.comment(chars.next().unwrap_or(' '));
            return Place::BlockComment { depth: 1 };
        }
        ('"', _) => {
            parts.blank(char);
            return Place::Text { hashes: None };
        }
        ('r', Some('"' | '#')) if !parts.in_word() => {
            let hashes = chars.clone().take_while(|char| *char == '#').count();
            if chars.clone().nth(hashes) == Some('"') {
                for _ in 0..=hashes {
                    parts.blank(chars.next().unwrap_or(' '));
                }
                parts.blank(char);
                return Place::Text { hashes: Some(hashes) };
            }
            parts.code(char);
        }
        ('\'', _) => skip_character(chars, parts),
        _ => parts.code(char),
    }
    Place::Code
}

/// Behind a quote: skips a character literal, or leaves a lifetime alone.
fn skip_character(chars: &mut Peekable<Chars<'_>>, parts: &mut Rust) {
    parts.blank('\'');
    let mut ahead = chars.clone();
    let literal = match ahead.next() {
        Some('\\') => true,
        Some(_) => ahead.next() == Some('\''),
        None => false,
    };
    if !literal {
        return;
    }
    let mut escaped = false;
    for char in chars.by_ref() {
        parts.blank(char);
        if char == '\'' && !escaped {
            return;
        }
        escaped = char == '\\' && !escaped;
    }
}

/// Takes `count` hashes if they are there: then a raw string ends here.
fn take_hashes(count: usize, chars: &mut Peekable<Chars<'_>>, parts: &mut Rust) -> bool {
    let found = chars.clone().take(count).filter(|char| *char == '#').count() == count;
    if found {
        for char in chars.by_ref().take(count) {
            parts.blank(char);
        }
    }
    found
}

impl Rust {
    fn code(&mut self, char: char) {
        self.code.push(char);
        self.comments.push(blank(char));
    }

    fn comment(&mut self, char: char) {
        self.code.push(blank(char));
        self.comments.push(char);
    }

    fn blank(&mut self, char: char) {
        self.code.push(blank(char));
        self.comments.push(blank(char));
    }

    /// Whether the code so far ends within a word, so that an `r` there starts no raw string.
    fn in_word(&self) -> bool {
        self.code.ends_with(|char: char| char.is_alphanumeric() || char == '_')
            && !self.code.ends_with(['b', 'c'])
    }
}

fn blank(char: char) -> char {
    if char == '\n' { '\n' } else { ' ' }
}

/// A Python source with comments and the insides of strings blanked out.
pub(super) fn python(text: &str) -> String {
    let mut code = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(char) = rest.chars().next() {
        let length = match char {
            '#' => rest.find('\n').unwrap_or(rest.len()),
            '"' | '\'' => string_length(rest, char),
            _ => {
                code.push(char);
                rest = &rest[char.len_utf8()..];
                continue;
            }
        };
        code.extend(rest[..length].chars().map(blank));
        rest = &rest[length..];
    }
    code
}

/// Bytes of the Python string that `text` starts with.
fn string_length(text: &str, quote: char) -> usize {
    let triple: String = [quote; 3].iter().collect();
    let mark = if text.starts_with(&triple) { triple.as_str() } else { &triple[..1] };
    let mut at = mark.len();
    while let Some(char) = text[at..].chars().next() {
        if text[at..].starts_with(mark) {
            return at + mark.len();
        }
        at += char.len_utf8();
        if char == '\\' {
            at += text[at..].chars().next().map_or(0, char::len_utf8);
        }
    }
    text.len()
}

/// Whether `text` has `word`, not as a part of a longer word.
pub(super) fn has_word(text: &str, word: &str) -> bool {
    let in_word = |char: char| char.is_alphanumeric() || char == '_';
    text.match_indices(word).any(|(at, _)| {
        !text[..at].ends_with(in_word) && !text[at + word.len()..].starts_with(in_word)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rust_comments_and_strings_are_no_code() {
        let parts = rust("let a = \"x // \\\" y\"; // z\n/* p /* q */ r */ b();\n");
        assert_eq!(
            parts.code.split_whitespace().collect::<Vec<_>>(),
            ["let", "a", "=", ";", "b();"]
        );
        let comments: Vec<_> = parts.comments.split_whitespace().collect();
        assert_eq!(comments, ["//", "z", "/*", "p", "/*", "q", "*/", "r", "*/"]);
        assert_eq!(parts.code.lines().count(), 2);
    }

    #[test]
    fn raw_strings_characters_and_lifetimes_are_told_apart() {
        let parts = rust("r#\"a \" b\"# br\"c\" '\"' '\\'' &'static d b'\"' e for r in f");
        let words: Vec<_> = parts.code.split_whitespace().collect();
        assert_eq!(words, ["b", "&", "static", "d", "b", "e", "for", "r", "in", "f"]);
    }

    #[test]
    fn python_strings_and_comments_are_no_code() {
        let code =
            python("\"\"\"import a\nimport b\"\"\"\nimport c  # import d\ne = 'f\\'g' + h\n");
        let words: Vec<_> = code.split_whitespace().collect();
        assert_eq!(words, ["import", "c", "e", "=", "+", "h"]);
        assert_eq!(code.lines().count(), 4);
    }

    #[test]
    fn a_word_is_not_a_part_of_a_longer_one() {
        assert!(has_word("an unsafe block", "unsafe"));
        assert!(!has_word("unsafe_code", "unsafe"));
    }
}
