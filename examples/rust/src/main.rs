//! Classify a binary PPM image with a .fqvit file.
//!
//!     FQVIT_PREFIX=/usr/local cargo run -- deit.fqvit photo.ppm

mod fqvit;

use fqvit::{Image, Model, Result};

fn read_ppm(path: &str) -> Result<Image> {
    let data = std::fs::read(path).map_err(|error| format!("{path}: {error}."))?;
    let damaged = || format!("{path}: not a binary PPM image with 8 bits per sample.");
    // P6, width, height and maximum, each followed by one white space character; then the pixels.
    let mut words = data.splitn(5, |byte| byte.is_ascii_whitespace());
    let mut number = || std::str::from_utf8(words.next()?).ok();
    if number() != Some("P6") {
        return Err(damaged());
    }
    let mut parsed = || number()?.parse::<u32>().ok();
    let (Some(width), Some(height), Some(255)) = (parsed(), parsed(), parsed()) else { return Err(damaged()) };
    let pixels = words.next().ok_or_else(damaged)?.to_vec();
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
