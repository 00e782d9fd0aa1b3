//! Our errors as Python's.

use kvbm::ErrorKind;
use kvbm_settings::SettingsError;
use pyo3::PyErr;

/// The classes, from Python: there they can derive from several of Python's own.
pub(crate) mod classes {
    pyo3::import_exception!(kvbm_rs.errors, ClosedError);
    pyo3::import_exception!(kvbm_rs.errors, FullError);
    pyo3::import_exception!(kvbm_rs.errors, InvalidError);
    pyo3::import_exception!(kvbm_rs.errors, KvbmError);
    pyo3::import_exception!(kvbm_rs.errors, SettingsError);
    pyo3::import_exception!(kvbm_rs.errors, StaleError);
    pyo3::import_exception!(kvbm_rs.errors, UnavailableError);
}

/// By what a caller can do about it.
pub(crate) fn of_manager(error: &kvbm::Error) -> PyErr {
    let message = error.to_string();
    match error.kind() {
        ErrorKind::Invalid => classes::InvalidError::new_err(message),
        ErrorKind::Unavailable => classes::UnavailableError::new_err(message),
        ErrorKind::Full => classes::FullError::new_err(message),
        ErrorKind::Closed => classes::ClosedError::new_err(message),
        ErrorKind::Stale => classes::StaleError::new_err(message),
        _ => classes::KvbmError::new_err(message),
    }
}

pub(crate) fn of_settings(error: &SettingsError) -> PyErr {
    classes::SettingsError::new_err(error.to_string())
}
