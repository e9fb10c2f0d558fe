"""Run programs in the browser: write and serve the web page that contains the engine as WebAssembly."""
