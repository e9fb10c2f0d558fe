//! Classify a binary PPM image with a .fqvit file.
//!
//!     FQVIT_PREFIX=/usr/local cargo run -- deit.fqvit photo.ppm

mod fqvit;

use fqvit::{Image, Model, Result};

fn read_ppm(path: &str) -> Result<Image> {
    let data = std::fs::read(path).map_err(|error| format!("{path}: {error}."))?;
    let damaged = || format!("{path}: not a binary PPM image with 8 bits per sample.");
    // P6, width, height and maximum, each followed by one white space character; then the pixels.
    let mut fields = data.splitn(5, |byte| byte.is_ascii_whitespace());
    let mut field = || std::str::from_utf8(fields.next()?).ok();
    if field() != Some("P6") {
        return Err(damaged());
    }
    let mut number = || field()?.parse::<u32>().ok();
    let (Some(width), Some(height), Some(255)) = (number(), number(), number()) else { return Err(damaged()) };
    let pixels = fields.next().ok_or_else(damaged)?.to_vec();
    Ok(Image { pixels, width, height })
}

fn classify(model: &str, image: &str) -> Result<()> {
    let model = Model::load(model)?;
    let logits = model.logits(&read_ppm(image)?)?;
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by_key(|&i| std::cmp::Reverse(logits[i])); // stable: of equal logits, the first class wins
    for &i in order.iter().take(3) {
        println!("{:8.3}  {}  {}", f64::from(logits[i]) * model.scale, i, model.class_name(i).unwrap_or(""));
    }
    Ok(())
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let result = match &arguments[..] {
        [_, model, image] => classify(model, image),
        _ => Err("expected a model and an image.".into()),
    };
    if let Err(error) = result {
        eprintln!("classify: {error}");
        std::process::exit(2);
    }
}
