// Declarations shared by the source files of the Python module.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>

#include "core/value.h"
#include "python/gate.h"

namespace nb = nanobind;

using Pixels = nb::ndarray<const std::uint8_t, nb::ndim<3>, nb::c_contig, nb::device::cpu>;

extern fqvit::Gate* gate;

// Releases the GIL like nb::gil_scoped_release, and registers the call with the gate (gate.h).
class WithoutGil {
public:
    WithoutGil() : state_(PyEval_SaveThread()) { gate->enter(); }
    ~WithoutGil() {
        gate->leave();
        PyEval_RestoreThread(state_);
        gate->returned();
    }
    WithoutGil(const WithoutGil&) = delete;
    WithoutGil& operator=(const WithoutGil&) = delete;

private:
    PyThreadState* state_;
};

// Makes a numpy array for a value. first: size of an additional leading axis; negative for none.
nb::object new_array(const fqvit::Value& value, std::int64_t first, std::uint8_t*& data);

// Adds the detector to the module.
void bind_detector(nb::module_& m);
