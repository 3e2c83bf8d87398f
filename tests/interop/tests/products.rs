//! What the format has, all together: version, extended L2 entries, cluster size, refcount width, LUKS, data file,
//! compression type, internal snapshots and bitmaps, in every product that is legal. An image that one program makes the
//! other reads, checks and writes on; its twin is made the other way round. Both programs find both images sound after each step,
//! and in the end twins are equal: the disk, each snapshot, each bitmap.
//!
//! There are about 1,200 products. A run takes a part of them, the same each time; `GAUR_PRODUCTS=all` takes all, which is
//! about an hour, and `GAUR_PRODUCTS=N` every Nth.

use std::process::Command;

use gaur_interop::gaur::binary;
use gaur_interop::nbd::Server;
use gaur_interop::scratch::Scratch;
use gaur_interop::tool::{Run, run};

/// Every so many products in an ordinary run. No divisor of what the dimensions have, so that all values meet.
const STRIDE: usize = 53;

#[derive(Clone, Copy, Debug, PartialEq)]
enum DataFile {
    None,
    Plain,
    Raw,
}

/// What an image has.
#[derive(Clone, Copy, Debug)]
struct Product {
    v2: bool,
    extended: bool,
    cluster_kib_halves: u32,
    refcount_bits: u32,
    luks: bool,
    data_file: DataFile,
    zstd: bool,
    snapshots: bool,
    bitmaps: bool,
}

const BOTH: [bool; 2] = [false, true];

/// All of them. Clusters are counted in half KiB.
fn products() -> Vec<Product> {
    let mut all = Vec::new();
    for (v2, extended, luks, zstd) in four(BOTH) {
        for (snapshots, bitmaps, _, _) in four(BOTH).into_iter().step_by(4) {
            for data_file in [DataFile::None, DataFile::Plain, DataFile::Raw] {
                for refcount_bits in [1, 2, 4, 8, 16, 32, 64] {
                    for cluster_kib_halves in [1, 8, 32, 128, 4096] {
                        all.push(Product {
                            v2,
                            extended,
                            cluster_kib_halves,
                            refcount_bits,
                            luks,
                            data_file,
                            zstd,
                            snapshots,
                            bitmaps,
                        });
                    }
                }
            }
        }
    }
    all.retain(Product::is_legal);
    all
}

fn four(values: [bool; 2]) -> Vec<(bool, bool, bool, bool)> {
    let bit = |number: usize, at: usize| values[number >> at & 1];
    (0..16)
        .map(|number| {
            (
                bit(number, 3),
                bit(number, 2),
                bit(number, 1),
                bit(number, 0),
            )
        })
        .collect()
}

impl Product {
    fn is_legal(&self) -> bool {
        let has_data_file = self.data_file != DataFile::None;
        let new = self.extended || self.zstd || self.bitmaps || has_data_file;
        !(self.v2 && (new || self.refcount_bits != 16)
            || self.extended && self.cluster_kib_halves < 32
            || has_data_file && (self.snapshots || self.zstd)
            || self.data_file == DataFile::Raw && self.luks
            || self.snapshots && self.refcount_bits == 1)
    }

    /// Whether compressed clusters can be written. Several share a host cluster, more than narrow refcounts count.
    fn compresses(&self) -> bool {
        self.data_file == DataFile::None && !self.luks && self.refcount_bits >= 8
    }

    fn options(&self, data: &str) -> String {
        let mut options = format!(
            "compat={},cluster_size={},refcount_bits={}",
            if self.v2 { "0.10" } else { "1.1" },
            self.cluster_kib_halves * 512,
            self.refcount_bits,
        );
        let mut add = |option: String| options = format!("{options},{option}");
        if !self.v2 {
            add(format!(
                "extended_l2={}",
                if self.extended { "on" } else { "off" }
            ));
        }
        if self.zstd {
            add("compression_type=zstd".to_owned());
        }
        if self.data_file != DataFile::None {
            add(format!("data_file={data}"));
        }
        if self.data_file == DataFile::Raw {
            add("data_file_raw=on".to_owned());
        }
        if self.luks {
            add("encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10".to_owned());
        }
        options
    }
}

const SECRET: &str = "secret,id=s,data=products";
const SIZE: &str = "6M";

/// One program that is used on an image.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Tool {
    Qemu,
    Gaur,
}

/// An image of a product.
struct Image {
    product: Product,
    path: String,
    data: String,
    /// Which one makes it, and which one writes on.
    tools: [Tool; 2],
}

impl Image {
    fn run(&self, tool: Tool, program: &str, words: &[&str]) -> Run {
        let at = usize::from(program == "qemu-img");
        let key: &[&str] = match self.product.luks {
            true => &["--object", SECRET],
            false => &[],
        };
        let all = [&words[..at], key, &words[at..]].concat();
        match tool {
            Tool::Qemu => run(program, &all),
            Tool::Gaur => run(binary(), &[&[program], &all[..]].concat()),
        }
    }

    /// The image as an option list.
    fn named(&self) -> String {
        let mut named = format!("driver=qcow2,file.filename={}", self.path);
        if self.product.luks {
            named += ",encrypt.key-secret=s";
        }
        named
    }

    fn create(&self) {
        let options = self.product.options(&self.data);
        let words = [
            "create", "-q", "-f", "qcow2", "-o", &options, &self.path, SIZE,
        ];
        self.run(self.tools[0], "qemu-img", &words).ok();
    }

    fn io(&self, tool: Tool, commands: &[&str]) {
        let named = self.named();
        let mut words = vec!["--image-opts", &named];
        words.extend(commands.iter().flat_map(|command| ["-c", command]));
        let done = self.run(tool, "qemu-io", &words).ok();
        assert!(
            !done.stdout.contains("failed"),
            "{:?}: {done}",
            self.product
        );
    }

    fn img(&self, tool: Tool, before: &[&str], after: &[&str]) -> Run {
        let named = self.named();
        let words = [before, &["--image-opts"], &[&named], after].concat();
        let done = self.run(tool, "qemu-img", &words);
        assert_eq!(done.code, 0, "{:?}: {done}", self.product);
        done
    }

    /// What `step` says, by the program whose turn it is.
    fn step(&self, step: usize) {
        let (product, tool) = (self.product, self.tools[step % 2]);
        let compressed = |plain: &'static str, packed: &'static str| match product.compresses() {
            true => packed,
            false => plain,
        };
        match step {
            0 => {
                self.create();
                let third = compressed("write -P 3 4M 2M", "write -c -P 3 4M 2M");
                self.io(tool, &["write -P 1 0 1500k", "write -P 2 2000k 7k", third]);
            }
            1 => {
                let changes = [
                    "write -P 4 511k 33k",
                    "write -z 640k 64k",
                    "write -P 5 2M 100k",
                ];
                self.io(tool, &[&changes[..], &["read -P 3 4M 2M"]].concat());
            }
            2 => {
                let changes = ["write -P 6 4100k 1M", "write -z 1M 256k"];
                self.io(tool, &[&changes[..], &["read -P 4 512k 32k"]].concat());
            }
            _ => self.io(
                tool,
                &[
                    "write -P 7 1100k 300k",
                    "write -P 8 3M 64k",
                    "read -P 6 4100k 1M",
                ],
            ),
        }
        if product.bitmaps && step < 2 {
            let name = ["first", "second"][step];
            self.img(tool, &["bitmap", "--add", "-g", "64k"], &[name]);
        }
        // A disk and three snapshots are more than two bits count.
        if product.snapshots && !(step == 2 && product.refcount_bits == 2) {
            let change = [["-c", "one"], ["-c", "two"], ["-c", "three"], ["-d", "one"]][step];
            self.img(tool, &[&["snapshot"], &change[..]].concat(), &[]);
        }
        for judge in [Tool::Qemu, Tool::Gaur] {
            self.img(judge, &["check", "-q"], &[]);
        }
    }

    /// The dirty parts of a bitmap, as QEMU's server shows them.
    fn marked(&self, name: &str, scratch: &Scratch) -> String {
        let socket = scratch.path("marked");
        let mut command = Command::new("qemu-nbd");
        if self.product.luks {
            command.args(["--object", SECRET]);
        }
        command.args([
            "-r",
            "-t",
            "-B",
            name,
            "-k",
            &socket,
            "--image-opts",
            &self.named(),
        ]);
        let server = Server::start(command, &socket);
        let context = format!("--map=qemu:dirty-bitmap:{name}");
        let map = run("nbdinfo", &[&context, "--json", &server.uri()])
            .ok()
            .stdout;
        server.stop();
        map
    }
}

fn images_are_equal(twins: &[Image; 2], scratch: &Scratch) {
    let [one, other] = twins;
    let product = one.product;
    let names = [&one.named(), &other.named()];
    for tool in [Tool::Qemu, Tool::Gaur] {
        let words = ["compare", "--image-opts", names[0], names[1]];
        let compared = one.run(tool, "qemu-img", &words);
        assert_eq!(compared.code, 0, "{product:?}: {compared}");
    }
    if product.snapshots {
        let left: &[&str] = match product.refcount_bits {
            2 => &["two"],
            _ => &["two", "three"],
        };
        for name in left {
            let views = [one, other].map(|image| {
                let raw = scratch.path(&format!("{name}-{:?}", image.tools[0]));
                let words = ["convert", "-O", "raw", "-l", name];
                image.img(Tool::Qemu, &words, &[&raw]);
                raw
            });
            run("cmp", &[&views[0], &views[1]]).ok();
        }
    }
    if product.bitmaps {
        for name in ["first", "second"] {
            let maps = [one, other].map(|image| image.marked(name, scratch));
            assert_eq!(maps[0], maps[1], "{product:?}: bitmap {name}");
            assert!(maps[0].contains("\"type\": 1"), "{product:?}: {}", maps[0]);
        }
    }
}

fn both_ways(product: Product) {
    let scratch = Scratch::new("products");
    let twins = [[Tool::Qemu, Tool::Gaur], [Tool::Gaur, Tool::Qemu]].map(|tools| {
        let name = format!("{:?}", tools[0]);
        Image {
            product,
            path: scratch.path(&name),
            data: scratch.path(&format!("{name}-data")),
            tools,
        }
    });
    for image in &twins {
        (0..4).for_each(|step| image.step(step));
    }
    images_are_equal(&twins, &scratch);
}

/// A part of the products.
fn some(part: usize, parts: usize) {
    let all = products();
    assert!(all.len() > 1000, "{}", all.len());
    let stride = match std::env::var("GAUR_PRODUCTS").as_deref() {
        Ok("all") => 1,
        Ok(number) => number.parse().expect("'all' or a number"),
        Err(_) => STRIDE,
    };
    for product in all.into_iter().step_by(stride).skip(part).step_by(parts) {
        println!("{product:?}");
        both_ways(product);
    }
}

#[test]
fn legal_products_are_shared_with_qemu_part_1() {
    some(0, 2);
}

#[test]
fn legal_products_are_shared_with_qemu_part_2() {
    some(1, 2);
}
