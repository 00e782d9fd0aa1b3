//! What a plugin is started with.

use std::collections::BTreeMap;
use std::ptr::null_mut;

use super::status::{c_string, done};
use super::sys::{NixlApi, ParamsS};
use crate::error::SetupError;

/// Parameters of a plugin that is to be started.
pub(super) struct PluginParameters(*mut ParamsS, &'static NixlApi);

impl PluginParameters {
    pub(super) fn new(
        api: &'static NixlApi,
        parameters: &BTreeMap<String, String>,
    ) -> Result<Self, SetupError> {
        let mut handle = null_mut();
        // SAFETY: makes an empty map, ours.
        done(unsafe { (api.create_params)(&raw mut handle) }, "hold parameters")?;
        let params = Self(handle, api);
        for (key, value) in parameters {
            let (key, value) =
                (c_string(key, "a NIXL parameter")?, c_string(value, "a NIXL parameter")?);
            // SAFETY: the map is ours, key and value are strings, which it copies.
            let status = unsafe { (api.params_add)(params.0, key.as_ptr(), value.as_ptr()) };
            done(status, "hold parameters")?;
        }
        Ok(params)
    }

    pub(super) const fn as_ptr(&self) -> *mut ParamsS {
        self.0
    }
}

impl Drop for PluginParameters {
    fn drop(&mut self) {
        // SAFETY: ours; the library copies what it keeps.
        unsafe { (self.1.destroy_params)(self.0) };
    }
}
