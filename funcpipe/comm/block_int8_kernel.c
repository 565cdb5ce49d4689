/* Blocks of 256 numbers in 8 bits, in two passes over the processor's cache: what `block_int8.py` states, bit for bit.

   Built with the package where there is a compiler; without it, `block_int8.py` works with operators of torch.
   Floating-point contraction must be off: a product and a sum that are rounded once are other bits. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#define BLOCK 256
#define MOST 127.0f
#define LARGEST_SCALE 0x1.020406p+121f /* the largest of which 127 are finite */
#define INFINITE 0x7f800000             /* the bits of infinity; those of NaN are above */
#define ROUNDER 12582912.0f             /* 1.5 * 2^23: added and taken away, it leaves the nearest whole number */
#define MISSING (-128)

#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__) && defined(__gnu_linux__)
#define FOR_ALL_PROCESSORS __attribute__((target_clones("avx2", "default")))
#else
#define FOR_ALL_PROCESSORS
#endif

static int32_t bits_of(float value) {
    int32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static int is_missing(float value) { return bits_of(value) == INT32_MIN; }

/* Returns the scale of a block, and sets `wanted` to what is to be sent. */
static inline float scale_of(const float *values, const float *kept, float *wanted, Py_ssize_t count) {
    int32_t most_bits = 0; /* magnitudes compare as their bits do, NaN being above all */
    for (Py_ssize_t i = 0; i < count; i++) {
        float value = kept ? (is_missing(values[i]) ? 0.0f : values[i] + kept[i]) : values[i];
        int32_t bits = bits_of(value) & INT32_MAX;
        most_bits = bits > most_bits ? bits : most_bits;
        wanted[i] = value;
    }
    float most;
    memcpy(&most, &most_bits, sizeof most);
    float scale = most / MOST;
    return most_bits >= INFINITE ? NAN : scale > LARGEST_SCALE ? LARGEST_SCALE : scale;
}

/* `kept` is null where nothing is fed back. */
FOR_ALL_PROCESSORS
static void quantise_block(const float *values, int8_t *whole, float *scale_of_block, float *kept, Py_ssize_t count) {
    float wanted[BLOCK];
    float scale = *scale_of_block = scale_of(values, kept, wanted, count);
    if (scale > 0.0f) {
        for (Py_ssize_t i = 0; i < count; i++) {
            float share = wanted[i] / scale;
            share = share > MOST ? MOST : share;
            share = share < -MOST ? -MOST : share;
            share = (share + ROUNDER) - ROUNDER;
            whole[i] = (int8_t)(is_missing(values[i]) ? MISSING : (int32_t)share);
            wanted[i] -= share * scale;
        }
    } else { /* all zero, too small for a scale, or not finite */
        for (Py_ssize_t i = 0; i < count; i++) {
            whole[i] = is_missing(values[i]) ? MISSING : 0;
            wanted[i] = scale == 0.0f ? wanted[i] : 0.0f;
        }
    }
    if (kept) {
        for (Py_ssize_t i = 0; i < count; i++) kept[i] = is_missing(values[i]) ? kept[i] : wanted[i];
    }
}

FOR_ALL_PROCESSORS
static void restore_block(const int8_t *whole, float scale, float *into, int adds, Py_ssize_t count) {
    for (Py_ssize_t i = 0; i < count; i++) {
        float value = (float)whole[i] * scale + 0.0f; /* a share that underflows is no missing number */
        value = whole[i] == MISSING ? -0.0f : value;
        into[i] = adds ? into[i] + value : value;
    }
}

static Py_ssize_t size_of_block(Py_ssize_t block, Py_ssize_t count) {
    Py_ssize_t rest = count - block * BLOCK;
    return rest < BLOCK ? rest : BLOCK;
}

static int are_vectors_of(Py_ssize_t count, const Py_buffer *numbers, const Py_buffer *whole, const Py_buffer *scales) {
    Py_ssize_t blocks = (count + BLOCK - 1) / BLOCK;
    if (numbers->len == count * 4 && whole->len == count && scales->len == blocks * 4) return 1;
    PyErr_SetString(PyExc_ValueError, "must be 32-bit numbers, a byte for each, and a 32-bit scale for each block");
    return 0;
}

static PyObject *quantise(PyObject *module, PyObject *arguments) {
    Py_buffer values, whole, scales, kept;
    if (!PyArg_ParseTuple(arguments, "y*w*w*w*:quantise", &values, &whole, &scales, &kept)) return NULL;
    Py_ssize_t count = values.len / 4;
    int fits = are_vectors_of(count, &values, &whole, &scales) &&
               are_vectors_of(count, kept.len ? &kept : &values, &whole, &scales);
    if (fits) {
        Py_BEGIN_ALLOW_THREADS
        for (Py_ssize_t block = 0; block * BLOCK < count; block++) {
            Py_ssize_t first = block * BLOCK;
            float *kept_of_block = kept.len ? (float *)kept.buf + first : NULL;
            quantise_block((const float *)values.buf + first, (int8_t *)whole.buf + first, (float *)scales.buf + block,
                           kept_of_block, size_of_block(block, count));
        }
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&values);
    PyBuffer_Release(&whole);
    PyBuffer_Release(&scales);
    PyBuffer_Release(&kept);
    if (!fits) return NULL;
    Py_RETURN_NONE;
}

static PyObject *restore(PyObject *module, PyObject *arguments) {
    Py_buffer whole, scales, into;
    int adds;
    if (!PyArg_ParseTuple(arguments, "y*y*w*p:restore", &whole, &scales, &into, &adds)) return NULL;
    int fits = are_vectors_of(whole.len, &into, &whole, &scales);
    if (fits) {
        Py_BEGIN_ALLOW_THREADS
        for (Py_ssize_t block = 0; block * BLOCK < whole.len; block++) {
            Py_ssize_t first = block * BLOCK;
            restore_block((const int8_t *)whole.buf + first, ((const float *)scales.buf)[block],
                          (float *)into.buf + first, adds, size_of_block(block, whole.len));
        }
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&whole);
    PyBuffer_Release(&scales);
    PyBuffer_Release(&into);
    if (!fits) return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"quantise", quantise, METH_VARARGS,
     "quantise(values, whole, scales, kept): as block_int8.quantise, where an empty `kept` stands for None."},
    {"restore", restore, METH_VARARGS, "restore(whole, scales, into, adds): as block_int8.restore."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "funcpipe.comm.block_int8_kernel", NULL, 0, functions, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit_block_int8_kernel(void) { return PyModuleDef_Init(&definition); }
