//! Tells the linker where libfqvit is: in $FQVIT_PREFIX, or where the system looks for libraries.

fn main() {
    println!("cargo:rerun-if-env-changed=FQVIT_PREFIX");
    if let Ok(prefix) = std::env::var("FQVIT_PREFIX") {
        println!("cargo:rustc-link-search=native={prefix}/lib");
        println!("cargo:rustc-link-arg=-Wl,-rpath,{prefix}/lib");
    }
    println!("cargo:rustc-link-lib=dylib=fqvit");
}
