//! What probes found, for people.

/// The state of NIXL under some settings.
#[derive(Clone, Debug)]
pub struct NixlReport {
    /// Version and place of the library, or why there is none and how to get it.
    pub library: Result<String, String>,
    /// Plugins that lie beside it as files.
    pub installed: Vec<String>,
    /// The plugins that the settings turn on.
    pub plugins: Vec<PluginReport>,
}

/// A plugin that is on.
#[derive(Clone, Debug)]
pub struct PluginReport {
    /// Its name.
    pub name: String,
    /// Its state, or why it does not run and what to do.
    pub state: Result<String, String>,
}

/// The state of GPU support: each part, or why it is missing and how to get it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuReport {
    /// Driver and devices.
    pub cuda: std::result::Result<String, String>,
    /// The compiler of kernels, which may be missing.
    pub nvrtc: std::result::Result<String, String>,
    /// Transfers between disk and GPU.
    pub gds: std::result::Result<String, String>,
    /// The NUMA node of each GPU, if the kernel says so: host memory is taken from there.
    pub nodes: Vec<Option<u32>>,
}
