//! Timing model of a rotating disk: seeks, rotation, transfer rate, the drive's cache.
//!
//! The drive serves requests in the order in which they come, each when the one before is done. Where the
//! arm is and which sector passes below it follow from the virtual time, so a request that comes a moment
//! too late for its sector waits for almost a whole turn, and one that was there in time and goes on where
//! the last one ended waits for nothing.
//!
//! What is left out: drives choose the order of requests themselves, outer tracks are faster, file systems
//! write a journal, and files are in pieces. Byte n of a file is byte n of the disk here. Reading a hole of the
//! file moves nothing.

use std::collections::VecDeque;
use std::ops::Range;

const SECOND_NS: u64 = 1_000_000_000;

/// A rotating disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rotating {
    /// Turns a minute.
    pub turns_per_minute: u64,
    /// Speed of the medium while bytes pass below the head.
    pub bytes_per_second: u64,
    /// A seek over a third of the disk.
    pub average_seek_ns: u64,
    /// A seek to the next track.
    pub shortest_seek_ns: u64,
    /// Length of the disk.
    pub capacity_bytes: u64,
    /// What a request costs besides, from the program to the drive and back.
    pub command_ns: u64,
    /// Speed of the wire.
    pub wire_bytes_per_second: u64,
    /// So much of what was transferred last is read again without the medium.
    pub read_memory_bytes: u64,
    /// Writes are done when they are in this much memory, not on the medium; 0 turns that off.
    pub write_memory_bytes: u64,
}

impl Rotating {
    /// A disk of 1 TB as they were sold in 2020, without a volatile write cache: 7200 turns a minute,
    /// 8 ms, 150 MB/s, on SATA.
    pub const SATA_7200: Rotating = Rotating {
        turns_per_minute: 7200,
        bytes_per_second: 150_000_000,
        average_seek_ns: 8_000_000,
        shortest_seek_ns: 1_000_000,
        capacity_bytes: 1_000_000_000_000,
        command_ns: 100_000,
        wire_bytes_per_second: 500_000_000,
        read_memory_bytes: 16 << 20,
        write_memory_bytes: 0,
    };

    fn turn_ns(&self) -> u64 {
        60 * SECOND_NS / self.turns_per_minute
    }

    /// Bytes that pass below the head in one turn.
    fn track_bytes(&self) -> u64 {
        scaled(self.turn_ns(), self.bytes_per_second, SECOND_NS)
    }

    fn on_medium_ns(&self, bytes: u64) -> u64 {
        scaled(bytes, SECOND_NS, self.bytes_per_second)
    }

    fn on_wire_ns(&self, bytes: u64) -> u64 {
        scaled(bytes, SECOND_NS, self.wire_bytes_per_second)
    }

    /// How long the arm moves; it gets faster the further it goes.
    fn seek_ns(&self, from: u64, to: u64) -> u64 {
        let track = self.track_bytes();
        if from == to || from / track == to / track {
            return 0;
        }
        let share = from.abs_diff(to) as f64 / self.capacity_bytes as f64;
        let longer = (self.average_seek_ns - self.shortest_seek_ns) as f64;
        self.shortest_seek_ns + (longer * (3.0 * share).sqrt()) as u64
    }

    /// When within a turn this byte passes below the head.
    fn angle_ns(&self, at: u64) -> u64 {
        scaled(at % self.track_bytes(), SECOND_NS, self.bytes_per_second)
    }
}

fn scaled(value: u64, by: u64, of: u64) -> u64 {
    (u128::from(value) * u128::from(by) / u128::from(of)) as u64
}

/// What a drive is to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Command {
    Read(Range<u64>),
    Write(Range<u64>),
    Flush,
    /// Something that only the file system does.
    Other,
}

/// A drive at work.
pub(crate) struct Drive {
    shape: Rotating,
    /// When the medium has done all that was asked for.
    free_ns: u64,
    /// Where the arm is then.
    position: u64,
    /// What is in the drive's memory, oldest first.
    recent: VecDeque<Range<u64>>,
    recent_bytes: u64,
    /// Writes that are acknowledged and not on the medium: when they will be, and how long they are.
    unwritten: VecDeque<(u64, u64)>,
}

impl Drive {
    pub(crate) fn new(shape: Rotating) -> Drive {
        Drive {
            shape,
            free_ns: 0,
            position: 0,
            recent: VecDeque::new(),
            recent_bytes: 0,
            unwritten: VecDeque::new(),
        }
    }

    /// Takes a command that comes now; when it is done.
    pub(crate) fn take(&mut self, now_ns: u64, command: &Command) -> u64 {
        let begin = now_ns + self.shape.command_ns;
        match command {
            Command::Other => begin,
            Command::Flush => begin.max(self.free_ns),
            Command::Read(range) if self.remembers(range) => {
                begin + self.shape.on_wire_ns(range.end - range.start)
            }
            Command::Read(range) => {
                self.remember(range);
                self.on_medium(begin, range)
            }
            Command::Write(range) if self.shape.write_memory_bytes == 0 => {
                self.remember(range);
                self.on_medium(begin, range)
            }
            Command::Write(range) => self.write_later(begin, range),
        }
    }

    /// Moves the arm and the bytes; when that is done.
    fn on_medium(&mut self, begin: u64, range: &Range<u64>) -> u64 {
        let shape = &self.shape;
        let transfer = shape.on_medium_ns(range.end - range.start);
        let start = begin.max(self.free_ns);
        let goes_on = range.start == self.position && start == self.free_ns;
        let arrived = start + shape.seek_ns(self.position, range.start);
        let turn = shape.turn_ns();
        let wait = if goes_on {
            0
        } else {
            (shape.angle_ns(range.start) + turn - arrived % turn) % turn
        };
        self.position = range.end;
        self.free_ns = if goes_on { start } else { arrived + wait } + transfer;
        self.free_ns
    }

    /// Takes a write into memory, and puts it on the medium when its turn comes.
    fn write_later(&mut self, begin: u64, range: &Range<u64>) -> u64 {
        let len = range.end - range.start;
        let mut begin = begin;
        self.unwritten.retain(|(done, _)| *done > begin);
        let room = self.shape.write_memory_bytes.saturating_sub(len);
        while self.unwritten.iter().map(|(_, len)| len).sum::<u64>() > room
            && let Some((done, _)) = self.unwritten.pop_front()
        {
            begin = begin.max(done);
        }
        self.remember(range);
        // The end of what waits already is written over in memory.
        let waits = self.free_ns > begin && range.contains(&self.position);
        let rest = if waits { self.position } else { range.start }..range.end;
        let done = self.on_medium(begin, &rest);
        self.unwritten.push_back((done, len));
        begin + self.shape.on_wire_ns(len)
    }

    fn remembers(&self, range: &Range<u64>) -> bool {
        let inside = |one: &Range<u64>| one.start <= range.start && range.end <= one.end;
        self.recent.iter().any(inside)
    }

    fn remember(&mut self, range: &Range<u64>) {
        self.recent_bytes += range.end - range.start;
        match self.recent.back_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ => self.recent.push_back(range.clone()),
        }
        while self.recent_bytes > self.shape.read_memory_bytes
            && let Some(oldest) = self.recent.front_mut()
        {
            let over = self.recent_bytes - self.shape.read_memory_bytes;
            let gone = over.min(oldest.end - oldest.start);
            oldest.start += gone;
            self.recent_bytes -= gone;
            if oldest.is_empty() {
                self.recent.pop_front();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;
    const MIB: u64 = 1 << 20;

    fn write(at: u64, len: u64) -> Command {
        Command::Write(at..at + len)
    }

    #[test]
    fn dependent_writes_lose_a_rotation_sequential_ones_none() {
        let shape = Rotating::SATA_7200;
        let turn = shape.turn_ns();
        assert_eq!(turn, 8_333_333);
        let mut queued = Drive::new(shape);
        let mut last = 0;
        for number in 0..100 {
            last = queued.take(0, &write(number * MIB, MIB));
        }
        let speed = 100.0 * MIB as f64 / (last as f64 / 1e9);
        assert!((140e6..=150e6).contains(&speed), "{speed}");

        let mut alone = Drive::new(shape);
        let mut now = 0;
        for number in 0..100 {
            now = alone.take(now, &write(number * MIB, MIB));
        }
        let lost = (now - last) / 99;
        assert!(lost > turn - MS / 10 && lost < turn + MS / 10, "{lost}");
    }

    #[test]
    fn a_seek_is_as_long_as_the_data_sheet_says() {
        let shape = Rotating::SATA_7200;
        let third = shape.capacity_bytes / 3;
        let average = shape.seek_ns(0, third);
        assert!(
            average.abs_diff(shape.average_seek_ns) < MS / 100,
            "{average}"
        );
        assert_eq!(shape.seek_ns(5000, 4000), 0);
        let next = shape.seek_ns(0, shape.track_bytes());
        assert!((MS..2 * MS).contains(&next), "{next}");
    }

    #[test]
    fn what_was_just_written_is_read_from_the_drives_memory() {
        let mut disk = Drive::new(Rotating::SATA_7200);
        let now = disk.take(0, &write(0, MIB));
        let read = disk.take(now, &Command::Read(MIB - 4096..MIB));
        assert!(read - now < MS, "{}", read - now);
        let far = disk.take(read, &Command::Read(100 * MIB..101 * MIB));
        assert!(far - read > 7 * MS, "{}", far - read);
    }

    #[test]
    fn a_write_cache_acknowledges_until_it_is_full_and_a_flush_waits_for_the_medium() {
        let shape = Rotating {
            write_memory_bytes: 8 * MIB,
            ..Rotating::SATA_7200
        };
        let mut disk = Drive::new(shape);
        let mut now = 0;
        let mut acknowledged = Vec::new();
        for number in 0..64 {
            let done = disk.take(now, &write(number * MIB, MIB));
            acknowledged.push(done - now);
            now = done;
        }
        assert!(acknowledged[0] < 3 * MS, "{acknowledged:?}");
        assert!(acknowledged[60] > 5 * MS, "{acknowledged:?}");
        let flushed = disk.take(now, &Command::Flush);
        let speed = 64.0 * MIB as f64 / (flushed as f64 / 1e9);
        assert!((130e6..=150e6).contains(&speed), "{speed}");
    }
}
