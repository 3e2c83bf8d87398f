use super::*;
use crate::algorithm::{Iv, KeyBits, Mode};
use crate::key_slot::Created;
use crate::secret::Passphrase;

fn passphrase(text: &str) -> Passphrase {
    Passphrase::new(text.as_bytes().to_vec())
}

/// Bytes that look random and are the same each time.
fn noise(mut state: u64) -> impl FnMut(&mut [u8]) {
    move |out| {
        for byte in out {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1);
            *byte = (state >> 56) as u8;
        }
    }
}

fn created(cipher: Cipher, hash: Hash) -> Created {
    let new = New {
        cipher,
        hash,
        iterations: 10,
        digest_iterations: 3,
        uuid: "12345678-1234-1234-1234-123456789abc".to_owned(),
    };
    Header::create(&new, &passphrase("first"), &mut noise(1)).expect("a header")
}

#[test]
fn key_slots_open_with_their_own_passphrase_and_no_other() {
    for mode in [Mode::Xts, Mode::Cbc] {
        for bits in [KeyBits::Aes128, KeyBits::Aes192, KeyBits::Aes256] {
            for hash in [Hash::Sha1, Hash::Sha256, Hash::Sha512] {
                let iv = Iv::EssivSha256;
                let Created {
                    mut header,
                    key,
                    stripes,
                } = created(Cipher { bits, mode, iv }, hash);
                let more = header
                    .set_slot(7, &key, &passphrase("second"), 5, &mut noise(2))
                    .expect("a slot");
                let header = Header::parse(&header.encode()).expect("what was written");
                assert_eq!(header.active_slots().count(), 2);
                for (slot, stripes, text) in [(0, &stripes, "first"), (7, &more, "second")] {
                    let open = |text| {
                        let slot = &header.slots[slot];
                        header.open_slot(slot, &mut stripes.clone(), &passphrase(text))
                    };
                    assert!(open(text).is_some_and(|found| found.matches(&key)));
                    assert!(open("third").is_none());
                }
            }
        }
    }
}

#[test]
fn an_erased_slot_is_free_and_opens_no_more() {
    let Created {
        mut header,
        stripes,
        ..
    } = created(Cipher::default(), Hash::Sha256);
    header.erase_slot(0).expect("a slot");
    let header = Header::parse(&header.encode()).expect("a header");
    assert_eq!(header.active_slots().count(), 0);
    let mut stripes = stripes;
    let opened = header.open_slot(&header.slots[0], &mut stripes, &passphrase("first"));
    assert!(opened.is_none());
    let mut header = header;
    assert!(header.erase_slot(8).is_err());
}

#[test]
fn new_headers_are_laid_out_as_qemu_lays_them_out() {
    let header = created(Cipher::default(), Hash::Sha256).header;
    assert_eq!(header.payload_offset_bytes, 2_068_480);
    assert_eq!(header.slots[1].offset_bytes, 4096 + 504 * 512);
}

#[test]
fn bad_headers_are_refused_in_one_line_that_says_why() {
    let good = created(Cipher::default(), Hash::Sha256).header.encode();
    assert!(Header::parse(&good).is_ok());
    let cases: &[(usize, &[u8], &str)] = &[
        (0, b"X", "wrong magic"),
        (7, &[2], "version 2 is not supported"),
        (8, b"serpent\0", "cipher \"serpent\" is not supported"),
        (40, b"ctr-plain64\0", "\"ctr-plain64\" is not supported"),
        (40, b"xts-essiv:md5\0", "\"xts-essiv:md5\" is not supported"),
        (40, b"xts\0", "\"xts\" is not supported"),
        (40, &[0xff; 32], "no text at byte 40"),
        (72, b"ripemd160\0", "hash \"ripemd160\" is not supported"),
        (104, &[0; 4], "detached"),
        (104, &[0, 0, 0, 9], "key slot 0 is out of place"),
        (108, &[0, 0, 0, 33], "a key of 33 bytes"),
        (108, &[0xff; 4], "a key of 4294967295 bytes"),
        (164, &[0; 4], "digest of no iterations"),
        (208, &[0; 4], "key slot 0 is neither active nor free"),
        (212, &[0; 4], "key slot 0 has no iterations"),
        (248, &[0, 0, 0, 1], "key slot 0 is out of place"),
        (248, &[0xff; 4], "key slot 0 is out of place"),
        (252, &[0, 0, 0, 1], "key slot 0 has 1 stripes"),
        (296, &[0, 0, 0, 9], "is out of place"),
    ];
    for (at, bytes, expected) in cases {
        let mut bad = good.clone();
        bad[*at..*at + bytes.len()].copy_from_slice(bytes);
        let error = Header::parse(&bad).expect_err(expected).to_string();
        assert!(error.contains(expected), "{error}");
        assert_eq!(error.lines().count(), 1);
    }
    for len in 0..HEADER_BYTES {
        assert!(Header::parse(&good[..len]).is_err(), "{len}");
    }
}

#[test]
fn a_header_that_wants_too_much_work_is_refused_before_it_is_done() {
    let mut bytes = created(Cipher::default(), Hash::Sha1).header.encode();
    bytes[212..216].copy_from_slice(&u32::MAX.to_be_bytes());
    let header = Header::parse(&bytes).expect("a header");
    let error = header.check_work().expect_err("too much");
    assert_eq!(error.kind(), ErrorKind::TooSlow);
    bytes[212..216].copy_from_slice(&1000_u32.to_be_bytes());
    bytes[164..168].copy_from_slice(&u32::MAX.to_be_bytes());
    let header = Header::parse(&bytes).expect("a header");
    assert!(header.check_work().is_err());
}

#[test]
fn passphrases_are_derived_as_rfc_6070_has_it() {
    let mut key = [0; 20];
    Hash::Sha1.derive(&passphrase("password"), b"salt", 4096, &mut key);
    let expected = [
        0x4b, 0x00, 0x79, 0x01, 0xb7, 0x65, 0x48, 0x9a, 0xbe, 0xad, 0x49, 0xd9, 0x26, 0xf7, 0x21,
        0xd0, 0x65, 0xa4, 0x29, 0xc1,
    ];
    assert_eq!(key, expected);
}

#[test]
fn secrets_are_not_shown() {
    let created = created(Cipher::default(), Hash::Sha256);
    let shown = format!("{:?} {:?}", created.key, passphrase("first"));
    assert_eq!(shown, "VolumeKey(..) Passphrase(..)");
}

/// Whatever a header says, it is refused or it is used within bounds; nothing panics.
#[test]
fn damaged_headers_are_refused_or_harmless() {
    let good = created(Cipher::default(), Hash::Sha256);
    let whole = good.header.encode();
    let mut random = noise(9);
    let mut number = |below: usize| {
        let mut bytes = [0; 8];
        random(&mut bytes);
        (u64::from_le_bytes(bytes) % below as u64) as usize
    };
    let (mut refused, mut slow, mut tried) = (0, 0, 0);
    for _ in 0..20_000 {
        let mut bytes = whole.clone();
        for _ in 0..=number(3) {
            let at = match number(2) {
                // The fields before the slots, and the first slot, are where most goes wrong.
                0 => number(256),
                _ => number(HEADER_BYTES),
            };
            bytes[at] = [0, 1, 0x7f, 0x80, 0xff, number(256) as u8][number(6)];
        }
        bytes.truncate(HEADER_BYTES - number(2) * number(HEADER_BYTES));
        let Ok(header) = Header::parse(&bytes) else {
            refused += 1;
            continue;
        };
        assert_eq!(Header::parse(&header.encode()).as_ref(), Ok(&header));
        for slot in &header.slots {
            assert!(header.stripes_of(slot).end <= header.payload_offset_bytes);
        }
        if header.check_work().is_err() {
            slow += 1;
            continue;
        }
        // What is allowed may take half a minute; here only what takes no time.
        let iterations = |slot: &&KeySlot| slot.iterations.is_some_and(|count| count < 100);
        let cheap = header.digest_iterations < 100;
        for slot in header
            .active_slots()
            .filter(iterations)
            .filter(|_| cheap)
            .take(1)
        {
            if tried < 50 {
                let mut stripes = good.stripes.clone();
                let _ = header.open_slot(slot, &mut stripes, &passphrase("first"));
                tried += 1;
            }
        }
    }
    assert!(refused > 5000, "{refused} were refused");
    assert!(slow > 20, "{slow} wanted too much work");
    assert_eq!(tried, 50);
}

#[test]
fn iterations_have_a_bound_that_all_slots_keep_within_the_work_allowed() {
    for hash in [Hash::Sha1, Hash::Sha256, Hash::Sha512] {
        let cipher = Cipher::default();
        let most = Header::iterations_max(cipher, hash);
        assert!(most > 1 << 20, "{most}");
        let mut header = created(cipher, hash).header;
        header.digest_iterations = most / 8;
        for slot in &mut header.slots {
            slot.iterations = Some(most);
        }
        assert_eq!(header.check_work(), Ok(()), "{hash:?}");
    }
}
