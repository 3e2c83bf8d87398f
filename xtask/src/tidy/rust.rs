//! Tidy rules for Rust source: sizes, names of modules, what roots of modules hold, where `unsafe` and
//! `async` may be.

use std::path::Path;

use syn::spanned::Spanned;
use syn::visit::{self, Visit};

use crate::tidy::finding::Finding;
use crate::workspace;

/// Lines of a file, so that a newcomer can hold it in the head.
const FILE_LINES_MAX: usize = 800;
/// Lines of a function from its signature to its closing brace: a screen, with a little room.
const FUNCTION_LINES_MAX: usize = 75;
/// Names that say nothing about what is inside.
const EMPTY_NAMES: &[&str] = &[
    "common",
    "helper",
    "helpers",
    "misc",
    "types",
    "util",
    "utils",
    "utilities",
];
/// The only places whose code may be `unsafe`: system calls and shared memory, and the one module through
/// which everybody else touches memory that a guest is changing.
const UNSAFE_PLACES: &[&str] = &[
    "crates/reactor/",
    "crates/export/",
    "crates/block/src/segments.rs",
];
/// State changes here are sync; awaits stand between them, never inside.
const SYNC_FOLDER: &str = "crates/engine/src/metadata/";

/// Findings in one source file.
pub fn check(path: &Path, content: &str) -> Vec<Finding> {
    let mut findings = Vec::new();
    let lines = content.lines().count();
    if lines > FILE_LINES_MAX {
        let what = format!("{lines} lines, {FILE_LINES_MAX} are allowed: split it");
        findings.push(Finding::at(path, 1, what));
    }
    let stem = path
        .file_stem()
        .and_then(|stem| stem.to_str())
        .unwrap_or_default();
    if EMPTY_NAMES.contains(&stem) {
        findings.push(Finding::at(
            path,
            1,
            format!("a module called '{stem}' says nothing"),
        ));
    }
    let file = match syn::parse_file(content) {
        Ok(file) => file,
        Err(error) => {
            findings.push(Finding::at(
                path,
                error.span().start().line,
                error.to_string(),
            ));
            return findings;
        }
    };
    // The tests of a module in a file of their own: the module has the head.
    if stem != "tests" && !has_head(&file) {
        findings.push(Finding::at(
            path,
            1,
            "no module head: say what it is for (//!)",
        ));
    }
    if is_root(path) {
        findings.extend(logic_in_root(path, &file));
    }
    let mut visitor = Visitor::new(path);
    visitor.visit_file(&file);
    findings.extend(visitor.findings);
    findings
}

fn has_head(file: &syn::File) -> bool {
    file.attrs
        .iter()
        .any(|attribute| attribute.path().is_ident("doc"))
}

/// Roots of modules: `lib.rs` and `mod.rs`.
fn is_root(path: &Path) -> bool {
    path.file_name()
        .is_some_and(|name| name == "lib.rs" || name == "mod.rs")
}

/// Items of a root that are more than lists of modules and names, and constants.
fn logic_in_root(path: &Path, file: &syn::File) -> Vec<Finding> {
    let what = "lib.rs and mod.rs list modules and names, nothing else";
    let items = file.items.iter().filter(|item| holds_logic(item));
    items
        .map(|item| Finding::at(path, item.span().start().line, what))
        .collect()
}

fn holds_logic(item: &syn::Item) -> bool {
    match item {
        syn::Item::Mod(syn::ItemMod { content, .. }) => match content {
            Some((_, items)) => items.iter().any(holds_logic),
            None => false,
        },
        syn::Item::Use(_) | syn::Item::ExternCrate(_) | syn::Item::Const(_) => false,
        _ => true,
    }
}

struct Visitor<'a> {
    path: &'a Path,
    may_be_unsafe: bool,
    must_be_sync: bool,
    findings: Vec<Finding>,
}

impl<'a> Visitor<'a> {
    fn new(path: &'a Path) -> Visitor<'a> {
        let shown = workspace::shown(path);
        Visitor {
            path,
            may_be_unsafe: UNSAFE_PLACES.iter().any(|place| shown.starts_with(place)),
            must_be_sync: shown.starts_with(SYNC_FOLDER),
            findings: Vec::new(),
        }
    }

    fn found(&mut self, spanned: &impl Spanned, what: impl Into<String>) {
        let line = spanned.span().start().line;
        self.findings.push(Finding::at(self.path, line, what));
    }

    fn function(&mut self, signature: &syn::Signature, block: &syn::Block) {
        let first = signature.span().start().line;
        let last = block.span().end().line;
        let lines = last + 1 - first;
        if lines > FUNCTION_LINES_MAX {
            let name = &signature.ident;
            let what = format!("{name}: {lines} lines, {FUNCTION_LINES_MAX} are allowed");
            self.found(signature, what);
        }
    }

    fn unsafe_at(&mut self, spanned: &impl Spanned) {
        if !self.may_be_unsafe {
            self.found(spanned, format!("unsafe outside {UNSAFE_PLACES:?}"));
        }
    }

    fn async_at(&mut self, spanned: &impl Spanned) {
        if self.must_be_sync {
            self.found(spanned, "async in metadata: state changes are sync");
        }
    }
}

impl Visit<'_> for Visitor<'_> {
    fn visit_item_fn(&mut self, item: &syn::ItemFn) {
        self.function(&item.sig, &item.block);
        visit::visit_item_fn(self, item);
    }

    fn visit_impl_item_fn(&mut self, item: &syn::ImplItemFn) {
        self.function(&item.sig, &item.block);
        visit::visit_impl_item_fn(self, item);
    }

    fn visit_trait_item_fn(&mut self, item: &syn::TraitItemFn) {
        if let Some(block) = &item.default {
            self.function(&item.sig, block);
        }
        visit::visit_trait_item_fn(self, item);
    }

    fn visit_signature(&mut self, signature: &syn::Signature) {
        if let Some(token) = &signature.asyncness {
            self.async_at(token);
        }
        visit::visit_signature(self, signature);
    }

    fn visit_item_mod(&mut self, item: &syn::ItemMod) {
        if EMPTY_NAMES.contains(&item.ident.to_string().as_str()) {
            self.found(
                item,
                format!("a module called '{}' says nothing", item.ident),
            );
        }
        visit::visit_item_mod(self, item);
    }

    fn visit_expr_unsafe(&mut self, expression: &syn::ExprUnsafe) {
        self.unsafe_at(expression);
        visit::visit_expr_unsafe(self, expression);
    }

    fn visit_item_impl(&mut self, item: &syn::ItemImpl) {
        if let Some(token) = &item.unsafety {
            self.unsafe_at(token);
        }
        visit::visit_item_impl(self, item);
    }

    fn visit_expr_async(&mut self, expression: &syn::ExprAsync) {
        self.async_at(expression);
        visit::visit_expr_async(self, expression);
    }

    fn visit_expr_await(&mut self, expression: &syn::ExprAwait) {
        self.async_at(expression);
        visit::visit_expr_await(self, expression);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings(name: &str, content: &str) -> Vec<String> {
        let path = workspace::root().join(name);
        check(&path, content)
            .iter()
            .map(ToString::to_string)
            .collect()
    }

    #[test]
    fn a_long_function_is_found_and_a_screenful_is_not() {
        let function =
            |lines: usize| format!("//! Head.\nfn f() {{\n{}}}\n", "f();\n".repeat(lines));
        assert_eq!(findings("a.rs", &function(FUNCTION_LINES_MAX - 2)).len(), 0);
        assert_eq!(findings("a.rs", &function(FUNCTION_LINES_MAX - 1)).len(), 1);
    }

    #[test]
    fn roots_hold_no_logic() {
        assert_eq!(
            findings("lib.rs", "//! Head.\nmod a;\npub use a::B;\n").len(),
            0
        );
        assert_eq!(findings("lib.rs", "//! Head.\nfn f() {}\n").len(), 1);
        assert_eq!(findings("a.rs", "//! Head.\nfn f() {}\n").len(), 0);
    }

    #[test]
    fn unsafe_stays_where_it_belongs() {
        let code = "//! Head.\nfn f() { unsafe { g() } }\n";
        assert_eq!(findings("crates/engine/src/read.rs", code).len(), 1);
        assert_eq!(findings("crates/reactor/src/ring.rs", code).len(), 0);
        assert_eq!(findings("crates/block/src/segments.rs", code).len(), 0);
        assert_eq!(findings("crates/block/src/payload.rs", code).len(), 1);
    }

    #[test]
    fn metadata_is_sync() {
        let code = "//! Head.\nasync fn f() { g().await }\n";
        assert_eq!(findings("crates/engine/src/metadata/l2.rs", code).len(), 2);
        assert_eq!(findings("crates/engine/src/read.rs", code).len(), 0);
    }

    #[test]
    fn empty_names_and_missing_heads_are_found() {
        assert_eq!(findings("utils.rs", "//! Head.\n").len(), 1);
        assert_eq!(findings("a.rs", "//! Head.\nmod types { }\n").len(), 1);
        assert_eq!(findings("a.rs", "fn f() {}\n").len(), 1);
    }
}
