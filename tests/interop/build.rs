//! Makes modules of the Rust in the README and `docs/`, which `tests/documents_rust.rs` compiles.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

fn main() {
    let here = PathBuf::from(std::env::var_os("CARGO_MANIFEST_DIR").expect("cargo says it"));
    let root = here
        .ancestors()
        .nth(2)
        .expect("two levels below the workspace");
    let mut modules = String::new();
    add(&root.join("README.md"), &mut modules);
    println!("cargo::rerun-if-changed={}", root.join("docs").display());
    let mut documents: Vec<PathBuf> = std::fs::read_dir(root.join("docs"))
        .expect("a folder")
        .map(|entry| entry.expect("an entry").path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "md"))
        .collect();
    documents.sort();
    for document in documents {
        add(&document, &mut modules);
    }
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo says it"));
    std::fs::write(out.join("documents.rs"), modules).expect("the folder is writable");
}

/// Adds the Rust of a document, each block as a module that is called after it and its number there.
fn add(document: &Path, modules: &mut String) {
    println!("cargo::rerun-if-changed={}", document.display());
    let text = std::fs::read_to_string(document).expect("a document");
    let name = document.file_stem().expect("a name").to_string_lossy();
    let name = name.to_lowercase().replace('-', "_");
    let blocks = text.split("\n```rust\n").skip(1);
    for (number, block) in blocks.enumerate() {
        let code = block.split("\n```").next().unwrap_or_default();
        let code = code.replace("\nfn main()", "\npub fn main()");
        let module = format!("pub mod {name}_{number} {{\n{code}\n}}\n");
        let made = write!(modules, "#[allow(missing_docs)]\n{module}");
        made.expect("text grows");
    }
}
