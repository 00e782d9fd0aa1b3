//! Bytes that Python shows us: by the buffer protocol, by DLPack, or by address.

use std::ffi::c_void;

use pyo3::buffer::PyUntypedBuffer;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyCapsuleMethods, PyDict};

use crate::errors::classes;

/// Host memory that Python keeps where it is until this is dropped.
pub(crate) struct HostBytes {
    address: usize,
    bytes: usize,
    is_readonly: bool,
    _owner: Owner,
}

/// Kept, not looked at.
#[allow(dead_code)]
enum Owner {
    Buffer(PyUntypedBuffer),
    Capsule(Py<PyAny>),
    /// The caller, who named an address.
    Caller,
}

impl HostBytes {
    /// Of an object with a contiguous buffer, such as `bytes`, a `memoryview` or an array; of a
    /// tensor on the CPU; or of `(address, bytes)`.
    pub(crate) fn of(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        if let Ok((address, bytes)) = object.extract::<(usize, usize)>() {
            return Ok(Self { address, bytes, is_readonly: false, _owner: Owner::Caller });
        }
        match PyUntypedBuffer::get(object) {
            Ok(buffer) => Self::of_buffer(buffer),
            Err(_) if object.hasattr("__dlpack__")? => Self::of_tensor(object),
            Err(error) => Err(error),
        }
    }

    fn of_buffer(buffer: PyUntypedBuffer) -> PyResult<Self> {
        if !buffer.is_c_contiguous() {
            return Err(classes::InvalidError::new_err(
                "the buffer is not contiguous: copy it, or give its rows",
            ));
        }
        let (address, bytes, is_readonly) =
            (buffer.buf_ptr() as usize, buffer.len_bytes(), buffer.readonly());
        Ok(Self { address, bytes, is_readonly, _owner: Owner::Buffer(buffer) })
    }

    fn of_tensor(tensor: &Bound<'_, PyAny>) -> PyResult<Self> {
        let (device, _): (i32, i32) = tensor.call_method0("__dlpack_device__")?.extract()?;
        if device != DL_CPU && device != DL_CUDA_HOST {
            return Err(classes::InvalidError::new_err("the tensor is not in the CPU's memory"));
        }
        let capsule = tensor.call_method("__dlpack__", (), None::<&Bound<'_, PyDict>>)?;
        let held = capsule.cast::<PyCapsule>()?;
        let managed = held.pointer_checked(Some(c"dltensor"))?.cast::<DlManagedTensor>();
        // SAFETY: a capsule of this name holds a DLManagedTensor (DLPack's Python specification),
        // which lives as long as the capsule does, since we leave the name, and with it the duty to
        // delete, to the capsule.
        #[allow(unsafe_code)]
        let layout = unsafe { managed.as_ref().tensor.layout() };
        let Some((address, bytes)) = layout else {
            return Err(classes::InvalidError::new_err(
                "the tensor is not contiguous: copy it, or give its rows",
            ));
        };
        Ok(Self { address, bytes, is_readonly: false, _owner: Owner::Capsule(capsule.unbind()) })
    }

    /// How many blocks of `block_bytes` these are.
    ///
    /// # Errors
    /// They are not whole blocks.
    pub(crate) fn blocks(&self, block_bytes: usize) -> PyResult<usize> {
        if self.bytes.is_multiple_of(block_bytes) {
            return Ok(self.bytes / block_bytes);
        }
        let message = format!("{} bytes are not whole blocks of {block_bytes} bytes", self.bytes);
        Err(classes::InvalidError::new_err(message))
    }

    /// Refuses what must not be written.
    pub(crate) fn writable(self) -> PyResult<Self> {
        if self.is_readonly {
            return Err(classes::InvalidError::new_err("the buffer is read-only"));
        }
        Ok(self)
    }

    /// Copies `block` to where the `index`-th block of its length is. False: there is no such
    /// place.
    pub(crate) fn write(&self, index: usize, block: &[u8]) -> bool {
        let Some(to) = self.place(index, block.len()) else { return false };
        // SAFETY: `place` is within memory that the owner keeps; nothing else may write it
        // meanwhile, which the caller of the Python function promises as for any buffer, and a slot
        // of ours does not overlap it.
        #[allow(unsafe_code)]
        unsafe {
            std::ptr::copy_nonoverlapping(block.as_ptr(), to as *mut u8, block.len());
        }
        true
    }

    /// Copies the `index`-th block of the slot's length to `slot`. False: there is none.
    pub(crate) fn read(&self, index: usize, slot: &mut [u8]) -> bool {
        let Some(from) = self.place(index, slot.len()) else { return false };
        // SAFETY: as for `write`.
        #[allow(unsafe_code)]
        unsafe {
            std::ptr::copy_nonoverlapping(from as *const u8, slot.as_mut_ptr(), slot.len());
        }
        true
    }

    fn place(&self, index: usize, block_bytes: usize) -> Option<usize> {
        let offset = index.checked_mul(block_bytes)?;
        (offset.checked_add(block_bytes)? <= self.bytes).then(|| self.address + offset)
    }
}

const DL_CPU: i32 = 1;
const DL_CUDA_HOST: i32 = 3;

/// `DLTensor` of DLPack's C header.
#[repr(C)]
struct DlTensor {
    data: *mut c_void,
    device: [i32; 2],
    dimensions: i32,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *const i64,
    strides: *const i64,
    byte_offset: u64,
}

/// `DLManagedTensor`, whose further fields are its owner's.
#[repr(C)]
struct DlManagedTensor {
    tensor: DlTensor,
}

impl DlTensor {
    /// Address and bytes; `None`: it is not contiguous.
    fn layout(&self) -> Option<(usize, usize)> {
        let count = usize::try_from(self.dimensions).ok()?;
        let element = (usize::from(self.bits) * usize::from(self.lanes)).div_ceil(8);
        let numbers = |start: *const i64| {
            let is_there = count > 0 && !start.is_null();
            // SAFETY: a DLTensor's shape has as many numbers as it has dimensions, and so have its
            // strides, unless they are null: it is contiguous then. They live as long as it does.
            #[allow(unsafe_code)]
            is_there.then(|| unsafe { std::slice::from_raw_parts(start, count) })
        };
        let shape = numbers(self.shape).unwrap_or_default();
        let mut elements = 1_i64;
        for (axis, &length) in shape.iter().enumerate().rev() {
            // An axis of one element is never stepped along.
            if numbers(self.strides).is_some_and(|strides| length > 1 && strides[axis] != elements)
            {
                return None;
            }
            elements = elements.checked_mul(length)?;
        }
        let address = (self.data as usize).checked_add(usize::try_from(self.byte_offset).ok()?)?;
        Some((address, usize::try_from(elements).ok()?.checked_mul(element)?))
    }
}
