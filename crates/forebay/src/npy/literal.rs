//! The literals of Python that a `.npy` header is made of: dictionaries with keys of text, tuples,
//! lists, text, whole numbers and booleans.

use forebay_io::Result;

use super::invalid;

/// How deep literals may be in each other. A header of a tensor has three levels.
const DEPTH_MAX: usize = 8;

/// One literal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Literal {
    Dict(Vec<(String, Literal)>),
    Tuple(Vec<Literal>),
    List(Vec<Literal>),
    Text(String),
    Integer(u64),
    Bool(bool),
}

impl Literal {
    /// Reads a literal that is all of the text but white space.
    pub(super) fn parse(text: &str) -> Result<Self> {
        let mut reader = Reader { rest: text };
        let literal = reader.literal(0)?;
        reader.skip();
        if reader.rest.is_empty() { Ok(literal) } else { Err(reader.unreadable()) }
    }
}

struct Reader<'a> {
    rest: &'a str,
}

impl Reader<'_> {
    fn literal(&mut self, depth: usize) -> Result<Literal> {
        if depth > DEPTH_MAX {
            return Err(invalid("the header is nested too deeply"));
        }
        self.skip();
        match self.rest.chars().next() {
            Some('{') => Ok(Literal::Dict(self.entries(depth)?)),
            Some('(') => Ok(Literal::Tuple(self.elements(')', depth)?)),
            Some('[') => Ok(Literal::List(self.elements(']', depth)?)),
            Some('\'' | '"') => Ok(Literal::Text(self.text()?)),
            Some(digit) if digit.is_ascii_digit() => Ok(Literal::Integer(self.integer()?)),
            _ if self.take("True") => Ok(Literal::Bool(true)),
            _ if self.take("False") => Ok(Literal::Bool(false)),
            _ => Err(self.unreadable()),
        }
    }

    fn entries(&mut self, depth: usize) -> Result<Vec<(String, Literal)>> {
        self.rest = &self.rest[1..];
        let mut entries = Vec::new();
        loop {
            if self.take("}") {
                return Ok(entries);
            }
            self.skip();
            let key = self.text()?;
            if !self.take(":") {
                return Err(self.unreadable());
            }
            entries.push((key, self.literal(depth + 1)?));
            if !self.take(",") {
                return if self.take("}") { Ok(entries) } else { Err(self.unreadable()) };
            }
        }
    }

    fn elements(&mut self, end: char, depth: usize) -> Result<Vec<Literal>> {
        self.rest = &self.rest[1..];
        let mut elements = Vec::new();
        let end = end.to_string();
        loop {
            if self.take(&end) {
                return Ok(elements);
            }
            elements.push(self.literal(depth + 1)?);
            if self.take(",") {
                continue;
            }
            // A tuple of one element has a comma: without it, it would be that element.
            let ends = self.take(&end) && (end == "]" || elements.len() > 1);
            return if ends { Ok(elements) } else { Err(self.unreadable()) };
        }
    }

    /// Text without escapes: names of dtypes have none.
    fn text(&mut self) -> Result<String> {
        let Some(quote) = self.rest.chars().next().filter(|char| ['\'', '"'].contains(char)) else {
            return Err(self.unreadable());
        };
        let inner = &self.rest[1..];
        let Some(end) = inner.find([quote, '\\', '\n']) else { return Err(self.unreadable()) };
        if !inner[end..].starts_with(quote) {
            return Err(self.unreadable());
        }
        self.rest = &inner[end + 1..];
        Ok(inner[..end].to_owned())
    }

    fn integer(&mut self) -> Result<u64> {
        let end = self.rest.find(|char: char| !char.is_ascii_digit()).unwrap_or(self.rest.len());
        let number = self.rest[..end].parse().map_err(|_| self.unreadable())?;
        self.rest = &self.rest[end..];
        self.rest = self.rest.strip_prefix('L').unwrap_or(self.rest);
        Ok(number)
    }

    /// Whether this comes next, after white space; steps over it if so.
    fn take(&mut self, wanted: &str) -> bool {
        self.skip();
        let rest = self.rest.strip_prefix(wanted);
        self.rest = rest.unwrap_or(self.rest);
        rest.is_some()
    }

    fn skip(&mut self) {
        self.rest = self.rest.trim_start_matches([' ', '\t', '\n', '\r']);
    }

    fn unreadable(&self) -> forebay_io::Error {
        let next: String = self.rest.chars().take(20).collect();
        invalid(format!("the header can't be read from {next:?} on"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn literals_are_read_as_python_reads_them() {
        use Literal::{Bool, Dict, Integer, List, Text, Tuple};
        for (text, literal) in [
            ("()", Tuple(vec![])),
            (" ( 1 , 2L ) ", Tuple(vec![Integer(1), Integer(2)])),
            ("(1,)", Tuple(vec![Integer(1)])),
            ("[('a', \"b\")]", List(vec![Tuple(vec![Text("a".into()), Text("b".into())])])),
            (
                "{'a': True, 'b': {}}",
                Dict(vec![("a".into(), Bool(true)), ("b".into(), Dict(vec![]))]),
            ),
        ] {
            assert_eq!(Literal::parse(text).unwrap(), literal, "{text}");
        }
    }

    #[test]
    fn what_is_no_literal_is_refused() {
        let deep = "[".repeat(10_000);
        for text in [
            "",
            "(",
            "(1)",
            "(,)",
            "{1: 2}",
            "'a",
            "'a\\'b'",
            "1 2",
            "-1",
            "0x10",
            "None",
            "99999999999999999999",
            "{'a' 1}",
            "__import__('os')",
            "{'a': 1 'b': 2}",
            &deep,
        ] {
            assert!(Literal::parse(text).is_err(), "{text}");
        }
    }
}
