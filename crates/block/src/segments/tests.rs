use super::*;

/// A generator of numbers (xorshift).
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % bound as u64) as usize
    }
}

/// `bytes` cut into a list, some of it empty.
fn cut<'a>(mut bytes: &'a [u8], random: &mut Random) -> Vec<Segment<'a>> {
    let mut list = Vec::new();
    while !bytes.is_empty() || random.below(3) == 0 {
        let len = bytes.len().min(random.below(40) * random.below(2));
        let (now, later) = bytes.split_at(len);
        list.push(Segment::from(now));
        bytes = later;
    }
    list
}

fn bytes_of(segments: Segments<'_>) -> Vec<u8> {
    let mut bytes = vec![0xee; segments.len()];
    segments.copy_to(&mut bytes);
    bytes
}

#[test]
fn any_window_has_the_bytes_of_the_flat_memory() {
    for seed in 1..400 {
        let random = &mut Random(seed);
        let flat: Vec<u8> = (0..random.below(300)).map(|at| at as u8).collect();
        let list = cut(&flat, random);
        let (mut window, mut at) = (Segments::new(&list), 0);
        loop {
            let expected = &flat[at..at + window.len()];
            assert_eq!(bytes_of(window), expected);
            let pieces: Vec<_> = window.pieces().collect();
            assert!(pieces.iter().all(|piece| piece.len() > 0));
            assert_eq!(window.single().is_some(), pieces.len() <= 1);
            let count = random.below(pieces.len() + 2);
            let some: usize = pieces.iter().take(count).map(|one| one.len()).sum();
            let first = window.first_pieces(count);
            assert!(first.len() == some || count > list.len());
            assert_eq!(bytes_of(first), expected[..first.len()]);
            if window.is_empty() {
                break;
            }
            let mid = random.below(window.len() + 1);
            let (head, tail) = window.split_at(mid);
            assert_eq!(bytes_of(head), expected[..mid]);
            assert_eq!(bytes_of(tail), expected[mid..]);
            (window, at) = match random.below(2) {
                0 => (head, at),
                _ => (tail, at + mid),
            };
        }
    }
}

#[test]
fn copies_and_zeros_reach_their_window_and_nothing_else() {
    for seed in 1..400 {
        let random = &mut Random(seed);
        let mut parts: Vec<Vec<u8>> = (0..1 + random.below(9))
            .map(|_| vec![7; random.below(2) * random.below(50)])
            .collect();
        let mut flat = parts.concat();
        let mut list: Vec<_> = parts.iter_mut().map(|one| IoSliceMut::new(one)).collect();
        let all = SegmentsMut::from(&mut list[..]);
        assert_eq!(all.len(), flat.len());
        for value in 0..20 {
            let start = random.below(flat.len() + 1);
            let len = random.below(flat.len() - start + 1);
            let window = all.split_at(start).1.split_at(len).0;
            match random.below(2) {
                0 => window.fill_zeros(),
                _ => window.copy_from(&vec![value; len]),
            }
            let written = bytes_of(*window);
            flat[start..start + len].copy_from_slice(&written);
            assert!(written.iter().all(|byte| [0, value].contains(byte)));
            assert_eq!(bytes_of(*all), flat);
        }
        assert_eq!(parts.concat(), flat);
    }
}

#[test]
fn slices_and_vectors_of_the_standard_library_are_lists() {
    let (first, second) = ([1; 3], [2; 4]);
    let list = [first.as_slice(), &[], &second].map(IoSlice::new);
    let segments = Segments::from(&list[..]);
    assert_eq!(bytes_of(segments), [1, 1, 1, 2, 2, 2, 2]);
    assert!(segments.single().is_none());
    assert_eq!(segments.split_at(3).1.single().unwrap().len(), 4);
    let mut bytes = [0; 5];
    SegmentsMut::from(&mut bytes[..]).copy_from(&[9; 5]);
    assert_eq!(bytes, [9; 5]);
    assert!(Segments::new(&[]).is_empty());
    assert_eq!(Segments::new(&[]).pieces().count(), 0);
}

#[test]
fn alignment_is_that_of_every_address_and_of_inner_lengths() {
    #[repr(align(4096))]
    struct Page([u8; 4096]);
    let page = Page([0; 4096]);
    let part = |start: usize, len: usize| Segment::from(&page.0[start..start + len]);
    for (list, address, len, expected) in [
        (vec![part(0, 10)], 4096, 512, true),
        (vec![part(8, 16)], 8, 512, true),
        (vec![part(8, 16)], 16, 1, false),
        (vec![part(0, 512), part(1024, 512)], 512, 512, true),
        (vec![part(0, 512), part(1024, 512)], 512, 1024, false),
        (vec![part(0, 512), part(1028, 512)], 512, 512, false),
        (vec![part(0, 3), part(7, 5)], 1, 1, true),
        (vec![part(0, 3), part(7, 5)], 1, 2, false),
    ] {
        let list = &list[..];
        let found = Segments::new(list).is_aligned(address, len);
        assert_eq!(found, expected, "{list:?} {address} {len}");
    }
}

#[test]
#[should_panic(expected = "a payload is split inside its length")]
fn a_split_past_the_end_panics() {
    let _ = Segments::from(&[0; 4][..]).split_at(5);
}

#[test]
fn zeros_are_found_whatever_the_segments_are() {
    let mut bytes = vec![0_u8; 5000];
    let is_zero = |bytes: &[u8], cuts: &[usize]| {
        let mut rest = bytes;
        let mut list = Vec::new();
        for cut in cuts {
            let (now, later) = rest.split_at(*cut);
            list.push(Segment::from(now));
            rest = later;
        }
        list.push(Segment::from(rest));
        Segments::new(&list).is_zero()
    };
    for cuts in [&[][..], &[1], &[1024, 7, 1000], &[4999]] {
        assert!(is_zero(&bytes, cuts));
        for at in [0, 1023, 1024, 2050, 4999] {
            bytes[at] = 0x80;
            assert!(!is_zero(&bytes, cuts), "{at}");
            bytes[at] = 0;
        }
    }
    assert!(Segments::from(&[0_u8; 0][..]).is_zero());
}
