//! Lays out what a power cut leaves.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::journal::Event;
use crate::random::Random;

/// Bytes that a drive writes whole or not at all, at their multiples in a file.
const BLOCK_BYTES: usize = 4096;
/// The directory that everything is in.
const ROOT: usize = 0;

/// What stays of what wasn't synced.
#[derive(Debug)]
pub enum Kept {
    /// Nothing.
    Nothing,
    /// Everything: the process was killed, the machine wasn't.
    Everything,
    /// Any part of it.
    Any(Random),
}

impl Kept {
    fn keeps(&mut self) -> bool {
        match self {
            Self::Nothing => false,
            Self::Everything => true,
            Self::Any(random) => random.one_in(2),
        }
    }
}

#[derive(Clone, Debug)]
enum Node {
    Directory(BTreeMap<PathBuf, usize>),
    File(Vec<u8>),
}

/// A change that is lost or not, apart from others.
#[derive(Clone, Debug)]
enum Change {
    /// Names in a directory, all of them at once.
    Names(Vec<(PathBuf, Option<usize>)>),
    /// A file's length.
    Length(usize),
    /// Bytes of a file, within a block.
    Bytes(usize, Vec<u8>),
}

/// What was done so far, as changes of nodes, and what all of it comes to.
#[derive(Debug)]
struct Machine {
    root: PathBuf,
    nodes: Vec<Node>,
    changes: Vec<(usize, Change)>,
    /// How many of the changes a sync of their node has followed, by node.
    synced: HashMap<usize, usize>,
}

/// Makes in the empty directory `target` what a power cut after `events` leaves of the directory
/// `root`.
///
/// # Errors
///
/// The target can't be written to.
///
/// # Panics
///
/// If the events can't have happened in this order.
pub fn image(root: &Path, events: &[Event], mut kept: Kept, target: &Path) -> io::Result<()> {
    let mut machine = Machine {
        root: root.to_owned(),
        nodes: vec![Node::Directory(BTreeMap::new())],
        changes: Vec::new(),
        synced: HashMap::new(),
    };
    for event in events {
        machine.play(event);
    }
    let blank = |node: &Node| match node {
        Node::Directory(_) => Node::Directory(BTreeMap::new()),
        Node::File(_) => Node::File(Vec::new()),
    };
    let mut nodes: Vec<Node> = machine.nodes.iter().map(blank).collect();
    for (index, (node, change)) in machine.changes.iter().enumerate() {
        let is_synced = machine.synced.get(node).is_some_and(|&synced| index < synced);
        if is_synced || kept.keeps() {
            apply(&mut nodes[*node], change);
        }
    }
    lay_out(&nodes, ROOT, target)
}

impl Machine {
    fn play(&mut self, event: &Event) {
        match event {
            Event::CreateDirectory(path) => {
                let node = self.add_node(Node::Directory(BTreeMap::new()));
                self.set_names(path, &[(path, Some(node))]);
            }
            Event::CreateFile(path, content) => {
                let node = self.add_node(Node::File(Vec::new()));
                self.set_names(path, &[(path, Some(node))]);
                self.change(node, Change::Length(content.len()));
                self.write(node, 0, content);
            }
            Event::Write { path, offset, bytes } => {
                let node = self.find(path);
                self.write(node, usize::try_from(*offset).unwrap_or(usize::MAX), bytes);
            }
            Event::SyncFile(path) | Event::SyncDirectory(path) => {
                let node = self.find(path);
                self.synced.insert(node, self.changes.len());
            }
            Event::Rename(from, to) => {
                let node = self.find(from);
                self.set_names(from, &[(from, None), (to, Some(node))]);
            }
            Event::Exchange(one, other) => {
                let (first, second) = (self.find(one), self.find(other));
                self.set_names(one, &[(one, Some(second)), (other, Some(first))]);
            }
            Event::RemoveFile(path) | Event::RemoveDirectory(path) => {
                self.set_names(path, &[(path, None)]);
            }
            Event::Returned(_) => {}
        }
    }

    fn add_node(&mut self, node: Node) -> usize {
        self.nodes.push(node);
        self.nodes.len() - 1
    }

    fn change(&mut self, node: usize, change: Change) {
        apply(&mut self.nodes[node], &change);
        self.changes.push((node, change));
    }

    fn set_names(&mut self, path: &Path, names: &[(&PathBuf, Option<usize>)]) {
        let parent = path.parent().unwrap_or(path);
        let node = self.find(parent);
        let names = names.iter().map(|(path, node)| {
            assert_eq!(path.parent(), Some(parent), "names change within a directory");
            (PathBuf::from(path.file_name().unwrap_or_default()), *node)
        });
        let change = Change::Names(names.collect());
        self.change(node, change);
    }

    fn write(&mut self, node: usize, offset: usize, bytes: &[u8]) {
        let mut done = 0;
        while done < bytes.len() {
            let at = offset + done;
            let length = (BLOCK_BYTES - at % BLOCK_BYTES).min(bytes.len() - done);
            self.change(node, Change::Bytes(at, bytes[done..done + length].to_vec()));
            done += length;
        }
    }

    fn find(&self, path: &Path) -> usize {
        let shown = path.display();
        let inner = path.strip_prefix(&self.root).ok();
        let inner = inner.unwrap_or_else(|| panic!("{shown} is outside"));
        inner.iter().fold(ROOT, |node, name| match &self.nodes[node] {
            Node::Directory(names) => {
                let found = names.get(Path::new(name)).copied();
                found.unwrap_or_else(|| panic!("there is no {shown}"))
            }
            Node::File(_) => panic!("{shown} goes through a file"),
        })
    }
}

fn apply(node: &mut Node, change: &Change) {
    match (node, change) {
        (Node::Directory(names), Change::Names(changes)) => {
            for (name, node) in changes {
                match node {
                    Some(node) => names.insert(name.clone(), *node),
                    None => names.remove(name),
                };
            }
        }
        (Node::File(content), Change::Length(length)) => content.resize(*length, 0),
        (Node::File(content), Change::Bytes(offset, bytes)) => {
            let end = offset + bytes.len();
            content.resize(content.len().max(end), 0);
            content[*offset..end].copy_from_slice(bytes);
        }
        (node, change) => panic!("{change:?} of {node:?}"),
    }
}

fn lay_out(nodes: &[Node], node: usize, path: &Path) -> io::Result<()> {
    match &nodes[node] {
        Node::File(content) => fs::write(path, content),
        Node::Directory(names) => {
            if node != ROOT {
                fs::create_dir(path)?;
            }
            names.iter().try_for_each(|(name, node)| lay_out(nodes, *node, &path.join(name)))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn left(events: &[Event], kept: Kept) -> Vec<(String, Option<Vec<u8>>)> {
        let target = tempfile::tempdir().unwrap();
        image(Path::new("/r"), events, kept, target.path()).unwrap();
        let mut found = Vec::new();
        for entry in fs::read_dir(target.path()).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            found.push((name, fs::read(&path).ok()));
        }
        found.sort();
        found
    }

    fn path(name: &str) -> PathBuf {
        Path::new("/r").join(name)
    }

    #[test]
    fn what_was_not_synced_is_lost_and_the_rest_is_not() {
        let mut events = vec![
            Event::CreateFile(path("a"), b"old".to_vec()),
            Event::SyncFile(path("a")),
            Event::SyncDirectory(path("")),
            Event::CreateFile(path("b"), b"new".to_vec()),
            Event::Rename(path("b"), path("a")),
        ];
        let old = ("a".to_owned(), Some(b"old".to_vec()));
        let new = ("a".to_owned(), Some(b"new".to_vec()));
        let empty = ("a".to_owned(), Some(Vec::new()));
        assert_eq!(left(&events, Kept::Nothing), [old]);
        assert_eq!(left(&events, Kept::Everything), std::slice::from_ref(&new));
        events.push(Event::SyncDirectory(path("")));
        assert_eq!(left(&events, Kept::Nothing), [empty], "its name was synced, its bytes weren't");
        events.push(Event::SyncFile(path("a")));
        assert_eq!(left(&events, Kept::Nothing), [new]);
    }

    #[test]
    fn names_change_places_at_once_and_bytes_are_lost_by_the_block() {
        let events = [
            Event::CreateDirectory(path("one")),
            Event::CreateFile(path("two"), vec![0; 2 * BLOCK_BYTES]),
            Event::SyncFile(path("two")),
            Event::SyncDirectory(path("")),
            Event::Exchange(path("one"), path("two")),
            Event::Write { path: path("one"), offset: 4000, bytes: vec![7; 200] },
        ];
        let mut seen = std::collections::BTreeSet::new();
        for seed in 0..64 {
            let found = left(&events, Kept::Any(Random::new(seed)));
            let file = found.iter().find_map(|(name, content)| Some((name, content.as_ref()?)));
            let (name, content) = file.unwrap();
            assert_eq!(content.len(), 2 * BLOCK_BYTES);
            seen.insert((name.clone(), content[4000], content[4100]));
            assert_eq!(content[4000], content[4095]);
        }
        assert_eq!(seen.len(), 8, "{seen:?}");
    }
}
