//! The C interface of NIXL, as far as it is used here, bound to a library that is loaded at run
//! time.
//!
//! Names, types and signatures are transcribed from `wrapper.h` of the crate `nixl-sys`, version
//! 1.5.2, whose notice is:
//!
//! ```text
//! SPDX-FileCopyrightText: Copyright (c) 2025-2026 NVIDIA CORPORATION & AFFILIATES. All rights reserved.
//! SPDX-License-Identifier: Apache-2.0
//!
//! Licensed under the Apache License, Version 2.0 (the "License");
//! you may not use this file except in compliance with the License.
//! You may obtain a copy of the License at
//!
//! http://www.apache.org/licenses/LICENSE-2.0
//!
//! Unless required by applicable law or agreed to in writing, software
//! distributed under the License is distributed on an "AS IS" BASIS,
//! WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
//! See the License for the specific language governing permissions and
//! limitations under the License.
//! ```

use std::ffi::{c_char, c_int, c_uint, c_void};

use libloading::os::unix::Library;

/// A function that NIXL has since 1.5.0, and 1.4.1 lacks: it tells the versions apart however the
/// library came here.
pub(super) const SINCE_1_5: &[u8] = b"nixl_capi_create_remote_dlist\0";

/// `nixl_capi_status_t`.
pub(super) type Status = c_int;

pub(super) const SUCCESS: Status = 0;
pub(super) const IN_PROGRESS: Status = 1;
pub(super) const ERROR_INVALID_PARAM: Status = -1;
pub(super) const ERROR_BACKEND: Status = -2;
pub(super) const ERROR_INVALID_STATE: Status = -3;
pub(super) const ERROR_EXCEPTION: Status = -4;
pub(super) const ERROR_NOT_FOUND: Status = -6;

/// `nixl_capi_mem_type_t`.
pub(super) type MemType = c_uint;

pub(super) const MEM_DRAM: MemType = 0;
pub(super) const MEM_OBJECT: MemType = 3;
pub(super) const MEM_FILE: MemType = 4;

/// `nixl_capi_xfer_op_t`.
pub(super) type XferOp = c_uint;

pub(super) const XFER_READ: XferOp = 0;
pub(super) const XFER_WRITE: XferOp = 1;

/// `nixl_capi_thread_sync_t`.
pub(super) type ThreadSync = c_uint;

pub(super) const THREAD_SYNC_STRICT: ThreadSync = 1;

/// `nixl_capi_agent_config_t`.
#[repr(C)]
pub(super) struct AgentConfig {
    pub(super) enable_prog_thread: bool,
    pub(super) enable_listen_thread: bool,
    pub(super) listen_port: c_int,
    pub(super) thread_sync: ThreadSync,
    pub(super) num_workers: c_uint,
    pub(super) pthr_delay_us: u64,
    pub(super) lthr_delay_us: u64,
    pub(super) capture_telemetry: bool,
}

/// `nixl_capi_xfer_telemetry_s`.
#[derive(Debug, Default)]
#[repr(C)]
pub(super) struct XferTelemetry {
    pub(super) start_time_us: u64,
    pub(super) post_duration_us: u64,
    pub(super) xfer_duration_us: u64,
    pub(super) total_bytes: u64,
    pub(super) desc_count: u64,
}

/// Types that only the library knows from inside.
macro_rules! opaque {
    ($($(#[$attribute:meta])* $name:ident;)*) => {$(
        $(#[$attribute])*
        #[repr(C)]
        pub(super) struct $name {
            _private: [u8; 0],
        }
    )*};
}

opaque! {
    AgentS;
    ParamsS;
    MemListS;
    BackendS;
    OptArgsS;
    XferDlistS;
    XferDlistHandleS;
    RegDlistS;
    XferReqS;
}

/// A field per function, and a constructor that finds them all.
macro_rules! functions {
    ($($name:ident($($argument:ident: $type:ty),*) -> $result:ty;)*) => {
        /// The functions of a loaded library, called as in C without their prefix `nixl_capi_`.
        pub(super) struct NixlApi {
            $(pub(super) $name: unsafe extern "C" fn($($argument: $type),*) -> $result,)*
        }

        impl NixlApi {
            /// # Errors
            /// The name of the first function that the library lacks.
            ///
            /// # Safety
            /// `library` is NIXL's C interface, and is never unloaded.
            pub(super) unsafe fn resolve(library: &Library) -> Result<Self, &'static str> {
                Ok(Self {$(
                    // SAFETY: the type is that of the header; the caller promises that it is this
                    // library.
                    $name: *unsafe { library.get(concat!("nixl_capi_", stringify!($name))) }
                        .map_err(|_| concat!("nixl_capi_", stringify!($name)))?,
                )*})
            }
        }
    };
}

functions! {
    create_configured_agent(name: *const c_char, config: *const AgentConfig, agent: *mut *mut AgentS) -> Status;
    destroy_agent(agent: *mut AgentS) -> Status;
    get_local_md(agent: *mut AgentS, data: *mut *mut c_void, len: *mut usize) -> Status;
    load_remote_md(agent: *mut AgentS, data: *const c_void, len: usize, name: *mut *mut c_char) -> Status;
    invalidate_remote_md(agent: *mut AgentS, remote: *const c_char) -> Status;
    agent_make_connection(agent: *mut AgentS, remote: *const c_char, args: *mut OptArgsS) -> Status;

    get_plugin_params(
        agent: *mut AgentS, plugin: *const c_char, mems: *mut *mut MemListS, params: *mut *mut ParamsS
    ) -> Status;
    destroy_mem_list(list: *mut MemListS) -> Status;
    create_params(params: *mut *mut ParamsS) -> Status;
    params_add(params: *mut ParamsS, key: *const c_char, value: *const c_char) -> Status;
    destroy_params(params: *mut ParamsS) -> Status;

    create_backend(
        agent: *mut AgentS, plugin: *const c_char, params: *mut ParamsS, backend: *mut *mut BackendS
    ) -> Status;
    destroy_backend(backend: *mut BackendS) -> Status;

    create_opt_args(args: *mut *mut OptArgsS) -> Status;
    destroy_opt_args(args: *mut OptArgsS) -> Status;
    opt_args_add_backend(args: *mut OptArgsS, backend: *mut BackendS) -> Status;

    create_reg_dlist(mem_type: MemType, list: *mut *mut RegDlistS) -> Status;
    destroy_reg_dlist(list: *mut RegDlistS) -> Status;
    reg_dlist_add_desc(
        list: *mut RegDlistS, addr: usize, len: usize, dev_id: u64, metadata: *const c_void, metadata_len: usize
    ) -> Status;
    register_mem(agent: *mut AgentS, list: *mut RegDlistS, args: *mut OptArgsS) -> Status;
    deregister_mem(agent: *mut AgentS, list: *mut RegDlistS, args: *mut OptArgsS) -> Status;

    create_xfer_dlist(mem_type: MemType, list: *mut *mut XferDlistS) -> Status;
    destroy_xfer_dlist(list: *mut XferDlistS) -> Status;
    xfer_dlist_add_desc(list: *mut XferDlistS, addr: usize, len: usize, dev_id: u64) -> Status;
    prep_xfer_dlist(
        agent: *mut AgentS, owner: *const c_char, list: *mut XferDlistS, handle: *mut *mut XferDlistHandleS,
        args: *mut OptArgsS
    ) -> Status;
    release_xfer_dlist_handle(agent: *mut AgentS, handle: *mut XferDlistHandleS) -> Status;

    create_xfer_req(
        agent: *mut AgentS, op: XferOp, local: *mut XferDlistS, remote: *mut XferDlistS, remote_name: *const c_char,
        request: *mut *mut XferReqS, args: *mut OptArgsS
    ) -> Status;
    make_xfer_req(
        agent: *mut AgentS, op: XferOp, local: *mut XferDlistHandleS, local_indices: *const c_int,
        local_count: usize, remote: *mut XferDlistHandleS, remote_indices: *const c_int, remote_count: usize,
        request: *mut *mut XferReqS, args: *mut OptArgsS
    ) -> Status;
    post_xfer_req(agent: *mut AgentS, request: *mut XferReqS, args: *mut OptArgsS) -> Status;
    get_xfer_status(agent: *mut AgentS, request: *mut XferReqS) -> Status;
    get_xfer_telemetry(agent: *mut AgentS, request: *mut XferReqS, telemetry: *mut XferTelemetry) -> Status;
    release_xfer_req(agent: *mut AgentS, request: *mut XferReqS) -> Status;
    destroy_xfer_req(request: *mut XferReqS) -> Status;

    is_stub() -> bool;
}
