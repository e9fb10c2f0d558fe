//! A safe wrapper of the part of fqvit.h that classifiers need.

use std::ffi::{c_char, c_int, c_void, CStr, CString};
use std::mem::{size_of, MaybeUninit};
use std::ptr::{null, null_mut};

/// fqvit_tensor
#[repr(C)]
struct Tensor {
    name: *const c_char,
    kind: *const c_char,
    dtype: c_int,
    axes: u32,
    shape: [i64; 8],
    bytes: u64,
    scale: f64,
    zero_point: i64,
    alpha: *const u8,
}

/// fqvit_image
#[repr(C)]
struct RawImage {
    pixels: *const u8,
    width: u32,
    height: u32,
    channels: u32,
    stride: u64,
}

extern "C" {
    fn fqvit_abi_version() -> u32;
    fn fqvit_last_error() -> *const c_char;
    fn fqvit_model_load(path: *const c_char, options: *const c_void, model: *mut *mut c_void) -> c_int;
    fn fqvit_model_free(model: *mut c_void);
    fn fqvit_model_input(model: *const c_void, tensor: *mut Tensor, size: usize) -> c_int;
    fn fqvit_model_output(model: *const c_void, i: u32, tensor: *mut Tensor, size: usize) -> c_int;
    fn fqvit_model_class_name(model: *const c_void, i: u32) -> *const c_char;
    fn fqvit_model_preprocess(model: *const c_void, image: *const RawImage, input: *mut u8, size: usize) -> c_int;
    fn fqvit_model_run(model: *mut c_void, images: *const u8, count: usize, y: *mut c_void, size: usize) -> c_int;
}

pub type Result<T> = std::result::Result<T, String>;

/// Turns a status into the error text of this thread.
fn check(status: c_int) -> Result<()> {
    match status {
        0 => Ok(()),
        _ => Err(unsafe { CStr::from_ptr(fqvit_last_error()) }.to_string_lossy().into_owned()),
    }
}

/// 8-bit RGB pixels, row by row.
pub struct Image {
    pub pixels: Vec<u8>,
    pub width: u32,
    pub height: u32,
}

/// A classifier.
pub struct Model {
    handle: *mut c_void,
    input_bytes: usize,
    classes: usize,
    pub scale: f64,
}

// fqvit.h: functions may be called from any thread, and calls on one handle run one after the other.
unsafe impl Send for Model {}
unsafe impl Sync for Model {}

impl Model {
    pub fn load(path: &str) -> Result<Model> {
        if unsafe { fqvit_abi_version() } != 1 {
            return Err("libfqvit has another ABI version, expected 1.".into());
        }
        let path = CString::new(path).map_err(|_| "the path contains a zero byte.".to_string())?;
        let mut handle = null_mut();
        check(unsafe { fqvit_model_load(path.as_ptr(), null(), &mut handle) })?;
        // From here on, Drop frees the handle.
        let mut model = Model { handle, input_bytes: 0, classes: 0, scale: 0.0 };
        let (mut input, mut output) = (MaybeUninit::<Tensor>::uninit(), MaybeUninit::<Tensor>::uninit());
        let (input, output) = unsafe {
            check(fqvit_model_input(handle, input.as_mut_ptr(), size_of::<Tensor>()))?;
            check(fqvit_model_output(handle, 0, output.as_mut_ptr(), size_of::<Tensor>()))?;
            (input.assume_init(), output.assume_init())
        };
        if unsafe { CStr::from_ptr(output.kind) } != c"logits" {
            return Err("the model is not a classifier.".into());
        }
        model.input_bytes = input.bytes as usize;
        model.classes = output.shape[0] as usize;
        model.scale = output.scale;
        Ok(model)
    }

    /// Resizes, crops and runs an image; returns one integer per class.
    pub fn logits(&self, image: &Image) -> Result<Vec<i32>> {
        if image.pixels.len() as u64 != u64::from(image.width) * u64::from(image.height) * 3 {
            return Err("the image does not have width * height * 3 bytes.".into());
        }
        let raw = RawImage { pixels: image.pixels.as_ptr(), width: image.width, height: image.height, channels: 3, stride: 0 };
        let mut input = vec![0u8; self.input_bytes];
        let mut logits = vec![0i32; self.classes];
        let size = logits.len() * size_of::<i32>();
        check(unsafe { fqvit_model_preprocess(self.handle, &raw, input.as_mut_ptr(), input.len()) })?;
        check(unsafe { fqvit_model_run(self.handle, input.as_ptr(), 1, logits.as_mut_ptr().cast(), size) })?;
        Ok(logits)
    }

    pub fn class_name(&self, i: usize) -> Option<&str> {
        let name = unsafe { fqvit_model_class_name(self.handle, i as u32) };
        if name.is_null() { None } else { unsafe { CStr::from_ptr(name) }.to_str().ok() }
    }
}

impl Drop for Model {
    fn drop(&mut self) {
        unsafe { fqvit_model_free(self.handle) }
    }
}
