/**
 * @file fqvit.h
 * Run .fqvit files: quantized vision transformers that compute with integers only, with bit-identical results on every
 * machine.
 *
 * @code
 * fqvit_model* model;
 * if (fqvit_model_load("deit.fqvit", NULL, &model) != FQVIT_OK) {
 *     fprintf(stderr, "%s\n", fqvit_last_error());
 *     return 1;
 * }
 * fqvit_model_preprocess(model, &photo, input, sizeof input);
 * fqvit_model_run(model, input, 1, logits, sizeof logits);
 * fqvit_model_free(model);
 * @endcode
 *
 * Detectors work in the same way, see fqvit_detector_load().
 *
 * **Errors.** Functions that can fail return a fqvit_status; 0 is success. After a failure, fqvit_last_error() returns
 * one line that names the problem and says what to do. A function that fails changes nothing, except that it sets
 * the handle that it would have created to NULL.
 *
 * **Threads.** Functions may be called from any thread. Calls on the same handle run one after the other; use one
 * handle per thread to run in parallel. The free functions are the exception: they must not run at the same time as
 * another call on the same handle.
 *
 * **Versions.** Within one FQVIT_ABI_VERSION, functions and struct members are only ever added, and new members
 * come at the end of their struct. fqvit_options begins with its size, and functions that fill a struct take its size,
 * so that older callers work with newer libraries.
 *
 * The header is C99; all names begin with fqvit_ or FQVIT_.
 */
#ifndef FQVIT_H
#define FQVIT_H

#include <stddef.h>
#include <stdint.h>

/* FQVIT_SHARED: defined by the CMake package if a Windows program uses the DLL. */
#if defined(_WIN32) && defined(FQVIT_SHARED) && defined(FQVIT_BUILDING)
#define FQVIT_API __declspec(dllexport)
#elif defined(_WIN32) && defined(FQVIT_SHARED)
#define FQVIT_API __declspec(dllimport)
#elif defined(__GNUC__) && !defined(_WIN32)
#define FQVIT_API __attribute__((visibility("default")))
#else
#define FQVIT_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/** The version of this interface. It changes only if callers must be compiled again. */
#define FQVIT_ABI_VERSION 1

/** Return the FQVIT_ABI_VERSION with which the library was built, to be compared with that of the header. */
FQVIT_API uint32_t fqvit_abi_version(void);

/** Return the version of the library, such as "0.2.0". */
FQVIT_API const char* fqvit_version(void);

/** The result of a call. */
typedef enum fqvit_status {
    FQVIT_OK = 0,             /**< success */
    FQVIT_ERROR_ARGUMENT = 1, /**< an argument is null, out of range, or a handle that does not exist (any more) */
    FQVIT_ERROR_FILE = 2,     /**< the file cannot be read */
    FQVIT_ERROR_PROGRAM = 3,  /**< the contents are damaged, of a newer version, or need more memory than allowed */
    FQVIT_ERROR_MEMORY = 4,   /**< not enough memory */
    FQVIT_ERROR_INTERNAL = 5  /**< a bug in the library */
} fqvit_status;

/**
 * Return the error of the last call on this thread that failed: one line of UTF-8 without a line break, which stays
 * valid until the next failing call on this thread. "" if no call has failed.
 */
FQVIT_API const char* fqvit_last_error(void);

/**
 * Return the name of the i-th instruction set that this library contains and this CPU supports, fastest first, or NULL
 * if there are fewer. The last one is always "scalar".
 */
FQVIT_API const char* fqvit_instruction_set(size_t i);

/**
 * How to load a file. Initialize with FQVIT_OPTIONS_INIT; members that are 0 select the default. An older library
 * rejects a member that it does not know, unless it is 0.
 */
typedef struct fqvit_options {
    size_t struct_size; /**< sizeof(fqvit_options) */
    uint32_t threads;   /**< threads of a run, 1 to 256; default: 1. Results do not depend on it. */
    const char*
        instruction_set;    /**< one of fqvit_instruction_set(); default: the fastest. Results do not depend on it. */
    uint64_t max_run_bytes; /**< limit on the memory for the buffers of one image; default: 512 MiB, detectors 8 GiB */
} fqvit_options;

#define FQVIT_OPTIONS_INIT {sizeof(fqvit_options), 0, NULL, 0}

/** The type of the integers of an array. */
typedef enum fqvit_dtype {
    FQVIT_U8 = 0,  /**< uint8_t */
    FQVIT_U16 = 1, /**< uint16_t */
    FQVIT_I32 = 2  /**< int32_t */
} fqvit_dtype;

/** The name, shape and meaning of an array: value = (integer - zero_point) * scale. Pointers live as long as the
 * handle. */
typedef struct fqvit_tensor {
    const char* name;  /**< name of the buffer */
    const char* kind;  /**< input: "pixels" or "codes"; output: "logits", "tokens", "pooled", "map", "scores", "deltas",
                        "embedding", "signs" */
    fqvit_dtype dtype; /**< type of the integers */
    uint32_t axes;     /**< number of entries of shape, 1 to 8 */
    int64_t shape[8];  /**< without the batch axis; an input has height, width, channels */
    uint64_t bytes;    /**< number of bytes per image */
    double scale;      /**< 0 for pixels */
    int64_t zero_point; /**< the integer that means 0 */
    const uint8_t*
        alpha; /**< one exponent per channel, the scale of channel c being scale * 2^alpha[c]; NULL if all are 0 */
    const char* output_name; /**< the name in `fqvit quantize --output`, such as "tokens@9"; "pixels" for an input */
} fqvit_tensor;

/** A decoded image with its EXIF orientation applied: rows of interleaved 8-bit pixels. */
typedef struct fqvit_image {
    const uint8_t* pixels;  /**< the first row; pixels are read during the call only */
    uint32_t width, height; /**< 1 to 4194304 */
    uint32_t channels;      /**< 1 gray, 3 RGB, 4 RGBA, whose alpha is ignored */
    uint64_t stride;        /**< bytes from one row to the next; 0: width * channels */
} fqvit_image;

/** A classifier or feature extractor. */
typedef struct fqvit_model fqvit_model;

/** What a model is. Pointers live as long as the handle. */
typedef struct fqvit_description {
    const char* model;           /**< name of the architecture */
    const char* source;          /**< where the float weights came from */
    const char* recipe;          /**< the quantization recipe as JSON */
    const char* header;          /**< the complete header of the file, as JSON */
    const char* fingerprint;     /**< SHA-256 of the contents, in hexadecimal; equal programs have equal fingerprints */
    const char* instruction_set; /**< the instruction set in use */
    uint32_t threads;            /**< number of threads in use */
    uint32_t outputs;            /**< number of outputs */
    uint32_t classes;            /**< number of class names; 0 if the file has none */
    uint64_t calibration_images; /**< number of images that the model was calibrated with */
    uint64_t weight_bytes;       /**< memory of packed weights and other constants */
    uint64_t run_bytes;          /**< memory of the buffers of one image, allocated by the first run */
    uint32_t resize;             /**< preprocessing: the short side is resized to this, then the center is cropped */
    const char* interpolation;   /**< of the resize: "bicubic" or "bilinear" */
    uint32_t squash;             /**< 1: images are resized to the aspect ratio of the input, 0: they keep their own */
    uint64_t macs; /**< multiply-accumulates of the matrix products for one image, a measure of the work of a run */
} fqvit_description;

/**
 * Load and verify a file. A file that passes verification runs without overflow and never accesses memory outside its
 * buffers.
 * @param path UTF-8
 * @param options NULL for the defaults
 */
FQVIT_API fqvit_status fqvit_model_load(const char* path, const fqvit_options* options, fqvit_model** model);

/** Load and verify a model from the bytes of a file. They are no longer needed after the call. */
FQVIT_API fqvit_status fqvit_model_load_memory(const void* data, size_t size, const fqvit_options* options,
                                               fqvit_model** model);

/** Free a model. NULL and a handle that was freed already are ignored. */
FQVIT_API void fqvit_model_free(fqvit_model* model);

/** Describe a model. size: sizeof(fqvit_description), so that an older caller gets the members that it knows. */
FQVIT_API fqvit_status fqvit_model_describe(const fqvit_model* model, fqvit_description* description, size_t size);

/** Describe the input. size: sizeof(fqvit_tensor). */
FQVIT_API fqvit_status fqvit_model_input(const fqvit_model* model, fqvit_tensor* tensor, size_t size);

/** Describe the i-th output; output 0 is the one that fqvit_model_run() returns. size: sizeof(fqvit_tensor). */
FQVIT_API fqvit_status fqvit_model_output(const fqvit_model* model, uint32_t i, fqvit_tensor* tensor, size_t size);

/** Return the name of class i in UTF-8, or NULL if there is none. The pointer lives as long as the handle. */
FQVIT_API const char* fqvit_model_class_name(const fqvit_model* model, uint32_t i);

/**
 * Prepare an image for the model: resize and center-crop, with results that are bit-identical to those of Pillow.
 * @param input height * width * channels bytes as fqvit_model_input() describes them
 * @param size the size of `input` in bytes
 */
FQVIT_API fqvit_status fqvit_model_preprocess(const fqvit_model* model, const fqvit_image* image, uint8_t* input,
                                              size_t size);

/**
 * Run a batch and return output 0. A count of 0 does nothing.
 * @param images count images, one after the other
 * @param y count times the bytes of the output, aligned to its type
 * @param size the size of `y` in bytes
 */
FQVIT_API fqvit_status fqvit_model_run(fqvit_model* model, const uint8_t* images, size_t count, void* y, size_t size);

/** Run a batch and return all outputs. ys and sizes have one entry per output. */
FQVIT_API fqvit_status fqvit_model_run_all(fqvit_model* model, const uint8_t* images, size_t count, void* const* ys,
                                           const size_t* sizes, uint32_t outputs);

/** A detector: boxes, classes and masks of the objects in an image. */
typedef struct fqvit_detector fqvit_detector;

/** The objects found in one image. */
typedef struct fqvit_detections fqvit_detections;

/** What a detector is. Pointers live as long as the handle. */
typedef struct fqvit_detector_description {
    const char* model;              /**< "mask_rcnn" or "cascade_mask_rcnn" */
    const char* source;             /**< where the float weights came from */
    const char* recipe;             /**< the quantization recipe as JSON */
    const char* header;             /**< the complete header of the file, as JSON */
    const char* fingerprint;        /**< SHA-256 of the contents, in hexadecimal */
    const char* instruction_set;    /**< the instruction set in use */
    uint32_t threads;               /**< number of threads in use */
    uint32_t classes;               /**< number of classes, without the background */
    uint32_t stages;                /**< number of box heads in sequence */
    uint64_t calibration_images;    /**< number of images that the detector was calibrated with */
    uint32_t short_side, long_side; /**< images keep their aspect ratio and get the largest size within both limits */
    const char* resize;             /**< how images are interpolated: "opencv" or "rounded" */
    uint32_t max_detections;        /**< per image */
    uint32_t mask_side;             /**< probabilities per side of a mask */
} fqvit_detector_description;

/**
 * One object. Divide lengths by 256 and scores by 2^24 to get pixels and probabilities; both divisions are exact. The
 * pointer is valid until the detections are freed.
 */
typedef struct fqvit_detection {
    int64_t box[4];               /**< x1, y1, x2, y2 in 1/256 pixel of the image */
    int64_t score;                /**< in units of 2^-24 */
    int64_t label;                /**< class index from 0 */
    int64_t category;             /**< COCO category of the class */
    const int32_t* probabilities; /**< of the mask: [mask_side, mask_side] in units of 2^-15 */
} fqvit_detection;

/** Load and verify the file of a detector. The parameters are those of fqvit_model_load(). */
FQVIT_API fqvit_status fqvit_detector_load(const char* path, const fqvit_options* options, fqvit_detector** detector);

/** Load and verify a detector from the bytes of a file. They are no longer needed after the call. */
FQVIT_API fqvit_status fqvit_detector_load_memory(const void* data, size_t size, const fqvit_options* options,
                                                  fqvit_detector** detector);

/** Free a detector. NULL and a handle that was freed already are ignored. Detections stay valid. */
FQVIT_API void fqvit_detector_free(fqvit_detector* detector);

/** Describe a detector. size: sizeof(fqvit_detector_description). */
FQVIT_API fqvit_status fqvit_detector_describe(const fqvit_detector* detector, fqvit_detector_description* description,
                                               size_t size);

/** Return the name of class i in UTF-8, or NULL if the file has none. */
FQVIT_API const char* fqvit_detector_class_name(const fqvit_detector* detector, uint32_t i);

/**
 * Detect objects, best first. The image may have any size; boxes and masks are in its coordinates.
 * @param found the caller must free it with fqvit_detections_free()
 */
FQVIT_API fqvit_status fqvit_detector_detect(fqvit_detector* detector, const fqvit_image* image,
                                             fqvit_detections** found);

/** Return the number of objects; 0 for a handle that does not exist. */
FQVIT_API size_t fqvit_detections_count(const fqvit_detections* found);

/** Return the i-th object. size: sizeof(fqvit_detection). */
FQVIT_API fqvit_status fqvit_detections_get(const fqvit_detections* found, size_t i, fqvit_detection* detection,
                                            size_t size);

/**
 * Compute the mask of the i-th object: 1 for its pixels, else 0.
 * @param mask height * width bytes, one per pixel of the image
 * @param size the size of `mask` in bytes
 */
FQVIT_API fqvit_status fqvit_detections_mask(const fqvit_detections* found, size_t i, uint8_t* mask, size_t size);

/** Free detections. NULL and a handle that was freed already are ignored. */
FQVIT_API void fqvit_detections_free(fqvit_detections* found);

#ifdef __cplusplus
}
#endif

#endif
