# fqvit_thread_run(i): gives worker i a stack and thread-local variables in its block of fqvit_thread_blocks, then waits for work.
# Written in assembly, because nothing may use the stack before this: the stack pointer of a new instance points into the stack of
# the thread that loads models.
	.globaltype __stack_pointer, i32
	.functype __wasm_init_tls (i32) -> ()
	.functype fqvit_thread_loop (i32) -> ()
	.globl fqvit_thread_run
	.type fqvit_thread_run,@function
fqvit_thread_run:
	.functype fqvit_thread_run (i32) -> ()
	local.get 0
	i32.const 262144
	i32.mul
	i32.const fqvit_thread_blocks+262144
	i32.add
	global.set __stack_pointer
	local.get 0
	i32.const 262144
	i32.mul
	i32.const fqvit_thread_blocks
	i32.add
	call __wasm_init_tls
	local.get 0
	call fqvit_thread_loop
	end_function
