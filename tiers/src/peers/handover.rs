//! The message that carries shared memory from process to process: its descriptor, and how it is
//! cut.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::cmsg_space;
use rustix::io::retry_on_intr;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

use super::{SharedMemory, untrusted};
use crate::error::{SetupError, SetupErrorKind};
use crate::geometry::Geometry;

/// Format, slots, bytes of a block, bytes from one slot to the next: eight bytes each.
const MESSAGE_BYTES: usize = 4 * 8;
/// Another layout of slots gets another format.
const FORMAT: u64 = u64::from_le_bytes(*b"kvbmmem1");

/// Hands memory over to the process at the other end, which takes it by [`receive_memory`].
///
/// # Errors
/// The stream's.
pub fn send_memory(mut stream: &UnixStream, memory: &SharedMemory) -> io::Result<()> {
    let message = encode(memory.geometry());
    let descriptors = [memory.file().as_fd()];
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let fits = ancillary.push(SendAncillaryMessage::ScmRights(&descriptors));
    debug_assert!(fits, "there is space for one descriptor");
    let parts = [IoSlice::new(&message)];
    let sent = retry_on_intr(|| sendmsg(stream, &parts, &mut ancillary, SendFlags::NOSIGNAL))?;
    stream.write_all(&message[sent..])
}

/// Takes over memory that the process at the other end hands over. Waits for it as long as the
/// stream's time-out says, and takes nothing from the stream but this message.
///
/// # Errors
/// `Io`: the stream's, also where it ends early. `Untrusted`: the message is another one, has no
/// slots that can be, or comes with any number of descriptors but one; they are closed.
pub fn receive_memory(stream: &UnixStream) -> Result<SharedMemory, SetupError> {
    let (message, descriptor) = receive(stream)?;
    Ok(SharedMemory::new(descriptor.into(), decode(&message)?))
}

fn receive(stream: &UnixStream) -> Result<([u8; MESSAGE_BYTES], OwnedFd), SetupError> {
    let mut message = [0; MESSAGE_BYTES];
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let received = retry_on_intr(|| {
        let parts = &mut [IoSliceMut::new(&mut message)];
        recvmsg(stream, parts, &mut ancillary, RecvFlags::CMSG_CLOEXEC)
    });
    let received = received.map_err(|error| broken(error.into()))?;
    let is_cut = received.flags.contains(ReturnFlags::CTRUNC);
    let descriptor = only_descriptor(&mut ancillary, is_cut);
    let mut stream = stream;
    stream.read_exact(&mut message[received.bytes..]).map_err(broken)?;
    Ok((message, descriptor?))
}

/// All others are closed: by the kernel where they find no room, else here.
fn only_descriptor(
    ancillary: &mut RecvAncillaryBuffer<'_>,
    is_cut: bool,
) -> Result<OwnedFd, SetupError> {
    let messages = ancillary.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
        _ => None,
    });
    let mut descriptors: Vec<_> = messages.flatten().collect();
    match descriptors.pop() {
        Some(descriptor) if descriptors.is_empty() && !is_cut => Ok(descriptor),
        None if !is_cut => Err(untrusted("its message came without a descriptor")),
        _ => Err(untrusted(
            "its message came with more than one descriptor, or this process may open no more files",
        )),
    }
}

fn encode(geometry: Geometry) -> [u8; MESSAGE_BYTES] {
    let sizes = [geometry.block_bytes(), geometry.stride()].map(|bytes| bytes as u64);
    let fields = [FORMAT, u64::from(geometry.slots()), sizes[0], sizes[1]];
    let mut message = [0; MESSAGE_BYTES];
    message.copy_from_slice(fields.map(u64::to_le_bytes).as_flattened());
    message
}

fn decode(message: &[u8; MESSAGE_BYTES]) -> Result<Geometry, SetupError> {
    let field = |at: usize| u64::from_le_bytes(message.as_chunks().0[at]);
    if field(0) != FORMAT {
        return Err(untrusted("its message is not one of this version"));
    }
    let [slots, block_bytes, stride] = [1, 2, 3].map(field);
    geometry(slots, block_bytes, stride).ok_or_else(|| {
        untrusted(format!(
            "it is said to have {slots} slots of {block_bytes} bytes, {stride} bytes apart"
        ))
    })
}

/// `None`: there can be no such slots.
fn geometry(slots: u64, block_bytes: u64, stride: u64) -> Option<Geometry> {
    let slots = u32::try_from(slots).ok()?;
    let block_bytes = usize::try_from(block_bytes).ok()?;
    let stride = usize::try_from(stride).ok()?;
    let room = stride.checked_sub(block_bytes)?;
    let geometry = Geometry::new(slots, block_bytes).ok()?.with_room(room).ok()?;
    (geometry.stride() == stride).then_some(geometry)
}

fn broken(error: io::Error) -> SetupError {
    let message = format!("cannot receive the memory of a peer: {error}");
    SetupError::caused(SetupErrorKind::Io, message, error)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::geometry::ALIGNMENT;

    proptest! {
        #[test]
        fn a_geometry_survives_the_message(slots in 1_u32..99, block in 1_usize..99_999, room in 0_usize..9_999) {
            let sent = Geometry::new(slots, block).unwrap().with_room(room).unwrap();
            prop_assert_eq!(decode(&encode(sent)).unwrap(), sent);
        }

        #[test]
        fn no_numbers_make_slots_that_overlap_or_overflow(slots: u32, block: u64, pages: u32, cut in 0_u32..64) {
            let (block, stride) = (block >> cut, u64::from(pages) * ALIGNMENT as u64);
            if let Some(geometry) = geometry(u64::from(slots), block, stride) {
                prop_assert!(geometry.block_bytes() <= geometry.stride());
                prop_assert!(geometry.stride().checked_mul(geometry.slots() as usize).is_some());
            }
        }
    }

    #[test]
    fn impossible_slots_are_refused() {
        let page = ALIGNMENT as u64;
        assert!(geometry(3, page, page).is_some());
        for (slots, block, stride) in [
            (0, page, page),
            (1 << 32 | 3, page, page),
            (3, 0, page),
            (3, page + 1, page),
            (3, page - 1, page + 1),
            (1 << 29, 1 << 40, 1 << 40),
            (3, u64::MAX, u64::MAX),
        ] {
            assert!(geometry(slots, block, stride).is_none(), "{slots} {block} {stride}");
        }
    }

    #[test]
    fn a_message_of_another_format_is_refused() {
        let mut message = encode(Geometry::new(3, 5000).unwrap());
        message[7] = b'2';
        assert_eq!(decode(&message).unwrap_err().kind(), SetupErrorKind::Untrusted);
    }
}
