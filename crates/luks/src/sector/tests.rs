//! Vectors of IEEE 1619-2007 (annex B) and of FIPS 197 (appendix C).

use super::*;

fn hex(text: &str) -> Vec<u8> {
    let digit = |byte: &u8| char::from(*byte).to_digit(16).expect("a digit") as u8;
    let digits: Vec<u8> = text.bytes().filter(u8::is_ascii_hexdigit).collect();
    digits
        .chunks(2)
        .map(|pair| digit(&pair[0]) << 4 | digit(&pair[1]))
        .collect()
}

fn counting() -> Vec<u8> {
    (0..SECTOR_BYTES).map(|at| at as u8).collect()
}

fn xts(bits: KeyBits, key: &str) -> SectorCipher {
    let cipher = Cipher {
        bits,
        mode: Mode::Xts,
        iv: Iv::Plain64,
    };
    SectorCipher::new(cipher, &hex(key))
}

#[test]
fn xts_aes_128_encrypts_vector_4_of_ieee_1619() {
    let cipher = xts(
        KeyBits::Aes128,
        "27182818284590452353602874713526 31415926535897932384626433832795",
    );
    let mut data = counting();
    cipher.encrypt(0, &mut data);
    let start = hex(
        "27a7479befa1d476489f308cd4cfa6e2a96e4bbe3208ff25287dd3819616e89c\
         c78cf7f5e543445f8333d8fa7f56000005279fa5d8b5e4ad40e736ddb4d35412",
    );
    let end = hex("b738b18deb4a427d1923ce3ff262735779a418f20a282df920147beabe421ee5319d0568");
    assert!(data.starts_with(&start) && data.ends_with(&end));
    cipher.decrypt(0, &mut data);
    assert_eq!(data, counting());
}

#[test]
fn xts_aes_256_encrypts_vector_10_of_ieee_1619() {
    let cipher = xts(
        KeyBits::Aes256,
        "2718281828459045235360287471352662497757247093699959574966967627\
         3141592653589793238462643383279502884197169399375105820974944592",
    );
    let mut data = counting();
    cipher.encrypt(0xff, &mut data);
    let start = hex(
        "1c3b3a102f770386e4836c99e370cf9bea00803f5e482357a4ae12d414a3e63b\
         5d31e276f8fe4a8d66b317f9ac683f44680a86ac35adfc3345befecb4bb188fd",
    );
    assert!(data.starts_with(&start));
    cipher.decrypt(0xff, &mut data);
    assert_eq!(data, counting());
}

#[test]
fn cbc_starts_with_the_block_of_fips_197_for_a_vector_of_zeros() {
    for (bits, key, block) in [
        (
            KeyBits::Aes128,
            "000102030405060708090a0b0c0d0e0f",
            "69c4e0d86a7b0430d8cdb78070b4c55a",
        ),
        (
            KeyBits::Aes192,
            "000102030405060708090a0b0c0d0e0f1011121314151617",
            "dda97ca4864cdfe06eaf70a0ec0d7191",
        ),
        (
            KeyBits::Aes256,
            "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f",
            "8ea2b7ca516745bfeafc49904b496089",
        ),
    ] {
        let cipher = Cipher {
            bits,
            mode: Mode::Cbc,
            iv: Iv::Plain64,
        };
        let cipher = SectorCipher::new(cipher, &hex(key));
        let mut data = vec![0; SECTOR_BYTES];
        let plain = hex("00112233445566778899aabbccddeeff");
        data[..16].copy_from_slice(&plain);
        // What the second block is added to: it is encrypted like the first.
        for (to, from) in data[16..32].iter_mut().zip(hex(block).iter().zip(&plain)) {
            *to = from.0 ^ from.1;
        }
        cipher.encrypt(0, &mut data);
        assert_eq!(data[..16], hex(block));
        assert_eq!(data[16..32], hex(block));
    }
}

#[test]
fn sectors_in_a_row_are_encrypted_as_each_alone() {
    for mode in [Mode::Xts, Mode::Cbc] {
        for iv in [Iv::Plain64, Iv::Plain, Iv::EssivSha256] {
            let cipher = Cipher {
                bits: KeyBits::Aes256,
                mode,
                iv,
            };
            let key: Vec<u8> = (0..cipher.key_bytes() as u8).collect();
            let cipher = SectorCipher::new(cipher, &key);
            let first = u64::from(u32::MAX) - 9;
            let plain: Vec<u8> = (0..19 * SECTOR_BYTES).map(|at| (at / 7) as u8).collect();
            let mut whole = plain.clone();
            cipher.encrypt(first, &mut whole);
            let mut each = plain.clone();
            for (number, sector) in (first..).zip(each.chunks_mut(SECTOR_BYTES)) {
                cipher.encrypt(number, sector);
            }
            assert_eq!(whole, each);
            cipher.decrypt(first, &mut whole);
            assert_eq!(whole, plain);
        }
    }
}

#[test]
fn plain_vectors_come_again_after_32_bits_and_others_do_not() {
    for (iv, again) in [
        (Iv::Plain, true),
        (Iv::Plain64, false),
        (Iv::EssivSha256, false),
    ] {
        let cipher = Cipher {
            iv,
            ..Cipher::default()
        };
        let cipher = SectorCipher::new(cipher, &[7; 64]);
        let (mut low, mut high) = (counting(), counting());
        cipher.encrypt(5, &mut low);
        cipher.encrypt(5 + (1 << 32), &mut high);
        assert_eq!(low == high, again, "{iv:?}");
    }
}

#[test]
fn legacy_key_is_the_passphrase_cut_at_16_bytes_or_its_first_zero() {
    let encrypted = |key: &[u8]| {
        let mut sector = counting();
        SectorCipher::legacy(&Passphrase::new(key.to_vec())).encrypt(7, &mut sector);
        sector
    };
    assert_eq!(
        encrypted(b"0123456789abcdefg"),
        encrypted(b"0123456789abcdef")
    );
    assert_eq!(encrypted(b"short"), encrypted(b"short\0and what is behind"));
    assert_ne!(encrypted(b"short"), encrypted(b"shorter"));
    let cipher = Cipher {
        bits: KeyBits::Aes128,
        mode: Mode::Cbc,
        iv: Iv::Plain64,
    };
    let mut sector = counting();
    SectorCipher::new(cipher, b"short\0\0\0\0\0\0\0\0\0\0\0").encrypt(7, &mut sector);
    assert_eq!(encrypted(b"short"), sector);
}
