// Take pictures with the camera.
import { byId, showError } from "./dom.js";
import { messageOf } from "../../package/src/errors.js";

let stream: MediaStream | null = null;
let count = 0;

function close(): void {
  for (const track of stream?.getTracks() ?? []) track.stop();
  stream = null;
  byId<HTMLVideoElement>("camera-view").srcObject = null;
  byId("camera").hidden = true;
  byId("camera-open").hidden = false;
}

async function open(): Promise<void> {
  if (navigator.mediaDevices === undefined) {
    showError("Camera: browsers allow it only on https: pages and on localhost. Open the page there, or choose an image.");
    return;
  }
  try {
    stream = await navigator.mediaDevices.getUserMedia({ video: { facingMode: "environment" }, audio: false });
  } catch (error) {
    showError(`Camera: cannot be used (${messageOf(error)}). Allow it in the browser, or choose an image.`);
    return;
  }
  byId<HTMLVideoElement>("camera-view").srcObject = stream;
  byId("camera").hidden = false;
  byId("camera-open").hidden = true;
  byId("camera-take").focus();
}

/** Return the current picture as a PNG file. */
async function take(): Promise<File | null> {
  const video = byId<HTMLVideoElement>("camera-view");
  if (video.videoWidth === 0) return null;
  const canvas = new OffscreenCanvas(video.videoWidth, video.videoHeight);
  canvas.getContext("2d")?.drawImage(video, 0, 0);
  return new File([await canvas.convertToBlob({ type: "image/png" })], `camera ${++count}.png`, { type: "image/png" });
}

/** Connect the buttons. onPicture: called with each picture */
export function setUpCamera(onPicture: (picture: File) => void): void {
  byId("camera-open").addEventListener("click", () => void open());
  byId("camera-close").addEventListener("click", () => {
    close();
    byId("camera-open").focus();
  });
  byId("camera-take").addEventListener("click", () => {
    void take().then((picture) => {
      if (picture !== null) onPicture(picture);
    });
  });
}
