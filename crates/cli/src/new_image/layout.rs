//! The layout of an image whose clusters nothing was said about (docs/decisions/15-layout-of-new-images.md).

use gaur_engine::Format;

use crate::notice::is_qemu;
use crate::options::OptionList;

/// What `gaur create` chooses: subclusters of 4 KiB, the unit in which guests write.
const CHOICE: [(&str, &str); 2] = [("cluster_size", "128k"), ("extended_l2", "on")];

/// What the choice means for other programs.
pub const CHOICE_NOTE: &str =
    "QEMU reads extended_l2=on since version 5.2; -o extended_l2=off is for older programs";

/// The same for the list of options.
pub const HELP: &str = "Without cluster_size, extended_l2 and compat=v2, 'gaur create' chooses cluster_size=128k,extended_l2=on.\n\
     QEMU reads that since version 5.2; extended_l2=off is for older programs.";

/// Adds the choice to the options, unless they say something of it, or ask for what cannot have it. Whether it was added.
pub fn choose(format: Format, options: &mut OptionList) -> bool {
    let told = CHOICE.iter().any(|(key, _)| options.has(key));
    let old = ["0.10", "v2"].contains(&options.last("compat").as_deref().unwrap_or_default());
    if is_qemu() || format != Format::Qcow2 || told || old {
        return false;
    }
    for (key, value) in CHOICE {
        options.add(key, value);
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layout_is_chosen_unless_told() {
        for (given, chosen) in [
            ("size=1M", true),
            ("compat=v3,lazy_refcounts=on", true),
            ("compat=v2,compat=1.1", true),
            ("cluster_size=64k", false),
            ("extended_l2=off", false),
            ("compat=0.10", false),
            ("compat=v2", false),
        ] {
            let mut options = OptionList::parse(&[given.to_owned()]).expect("a list");
            assert_eq!(choose(Format::Qcow2, &mut options), chosen, "{given}");
        }
        assert!(!choose(Format::Raw, &mut OptionList::default()));
    }
}
